"""The exported models keep to what TensorRT documents, and rewriting them for that changes no results."""

from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs pip install 'dualrc[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs pip install 'dualrc[onnx]'")

from onnx import TensorProto, helper  # noqa: E402

from dualrc.onnx.export import ExportConfig, export  # noqa: E402
from dualrc.onnx.portable import make_portable  # noqa: E402

FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16})
NUMBERS = FLOATS | {TensorProto.INT32, TensorProto.INT64}
# Operators by the element types of their data that TensorRT 10 documents.
DOCUMENTED = {
    FLOATS: "AveragePool Clip Conv Einsum Exp Gemm IsInf Log MatMul NonZero Reciprocal Resize Sigmoid Softmax Sqrt",
    NUMBERS: "Abs Add ArgMax Div Equal Greater GreaterOrEqual IsNaN Less LessOrEqual Max Min Mod Mul Pad Range "
    "ReduceL2 ReduceMax ReduceSum Relu ScatterND Sub TopK",
    NUMBERS | {TensorProto.BOOL}: "Cast Concat Constant ConstantOfShape Expand Flatten Gather GatherElements Reshape "
    "Shape Slice Split Squeeze Transpose Unsqueeze Where",
    frozenset({TensorProto.BOOL}): "And Or",
}
# K of TopK must be less.
MOST = 3840


def assert_documented(path: Path) -> None:
    graph = onnx.shape_inference.infer_shapes(onnx.load(str(path)), strict_mode=True).graph
    constants = {value.name: value for value in graph.initializer}
    constants |= {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    shown = (*graph.value_info, *graph.input, *graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in shown}
    types |= {name: value.data_type for name, value in constants.items()}
    allowed = {name: kinds for kinds, names in DOCUMENTED.items() for name in names.split()}
    for node in graph.node:
        assert node.op_type in allowed, node.op_type
        if node.input:
            data = node.input[1] if node.op_type == "Where" else node.input[0]
            found = TensorProto.DataType.Name(types[data])
            assert types[data] in allowed[node.op_type], f"{node.op_type} of {found}: {node.name}"
        own = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert own.get("to") != TensorProto.DOUBLE and own.get("reduction", b"none") == b"none", node.name
        if node.op_type.startswith("Reduce") and len(node.input) > 1:
            assert node.input[1] in constants, node.name
        elif node.op_type == "TopK":
            assert own.get("sorted", 1) == 1 and onnx.numpy_helper.to_array(constants[node.input[1]]) < MOST
        elif node.op_type == "Resize":
            assert (own["mode"], own["coordinate_transformation_mode"]) == (b"linear", b"half_pixel")


def assert_shapes_are_constant_until_nonzero(path: Path) -> None:
    graph = onnx.shape_inference.infer_shapes(onnx.load(str(path)), data_prop=True).graph
    after: set[str] = set()
    for node in graph.node:
        if node.op_type == "NonZero" or not after.isdisjoint(node.input):
            after.update(node.output)
    shapes = {value.name: value.type.tensor_type.shape.dim for value in graph.value_info}
    assert after and len(shapes) > len(after)
    assert all(dim.HasField("dim_value") for name, shape in shapes.items() if name not in after for dim in shape)


@pytest.mark.parametrize(
    "config",
    [ExportConfig(top=300), ExportConfig(size=(96, 64), precision="float16", top=MOST - 1)],
    ids=["any size, float32", "one size, float16"],
)
def test_tensorrt_documents_operators_and_types(config, tmp_path):
    _, pair = paths = export(tmp_path, config)
    for path in paths:
        assert_documented(path)
    if config.size is not None:
        assert_shapes_are_constant_until_nonzero(pair)


def small_model() -> "onnx.ModelProto":
    """Every case of the rewriting, and a Clip that stays."""
    nodes = [
        helper.make_node("Clip", ["x", "least", "most"], ["both"], name="a"),
        helper.make_node("Clip", ["x", "", "most"], ["above"], name="b"),
        helper.make_node("Clip", ["x", "least"], ["below"], name="c"),
        helper.make_node("Clip", ["x"], ["free"], name="d"),
        helper.make_node("Equal", ["both", "x"], ["same"]),
        helper.make_node("NonZero", ["same"], ["where"], name="e"),
        helper.make_node("Cast", ["y"], ["wide"], to=TensorProto.DOUBLE),
        helper.make_node("IsInf", ["wide"], ["infinite"]),
        helper.make_node("Clip", ["y"], ["real"]),
    ]
    inputs = {"x": (TensorProto.INT64, [4]), "y": (TensorProto.FLOAT, [3])}
    outputs = {
        **dict.fromkeys(("both", "above", "below", "free"), (TensorProto.INT64, [4])),
        "where": (TensorProto.INT64, [1, None]),
        "infinite": (TensorProto.BOOL, [3]),
        "real": (TensorProto.FLOAT, [3]),
    }
    values = [[helper.make_tensor_value_info(n, *kind) for n, kind in side.items()] for side in (inputs, outputs)]
    bounds = [helper.make_tensor(name, TensorProto.INT64, [], [value]) for name, value in (("least", 2), ("most", 5))]
    graph = helper.make_graph(nodes, "small", *values, bounds)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_rewriting_keeps_the_results():
    model = small_model()
    inputs = {"x": np.array([0, 3, 5, 9]), "y": np.array([1, np.inf, np.nan], np.float32)}

    def run():
        onnx.checker.check_model(model, full_check=True)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return session.run(None, inputs)

    before = run()
    assert [values.tolist() for values in before[:5]] == [
        [2, 3, 5, 5],
        [0, 3, 5, 5],
        [2, 3, 5, 9],
        [0, 3, 5, 9],
        [[1, 2]],
    ]
    make_portable(model)
    for found, wanted in zip(run(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds == ["Max", "Min", "Min", "Max", "Identity", "Equal", "Cast", "NonZero", "IsInf", "Clip"]
