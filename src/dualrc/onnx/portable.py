"""Replacement of operator types that ONNX Runtime accepts and TensorRT does not document."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx


def make_portable(model: "onnx.ModelProto") -> None:
    """Rewrite a graph in place so that its values and results stay the same.

    The tracer of torch writes Clip of integers, NonZero of booleans, and IsInf of float64. TensorRT documents these
    operators for float32 and float16 only, and float64 for none.
    """
    from onnx import TensorProto, helper

    types = _element_types(model)
    made = {output: node for node in model.graph.node for output in node.output}
    nodes: list[Any] = []
    for node in model.graph.node:
        source = node.input[0] if node.input else ""
        if node.op_type == "Clip" and types.get(source) in (TensorProto.INT32, TensorProto.INT64):
            nodes += _bounded(node)
        elif node.op_type == "NonZero" and types.get(source) == TensorProto.BOOL:
            number = f"{source}_as_float"
            nodes.append(helper.make_node("Cast", [source], [number], name=f"{node.name}_cast", to=TensorProto.FLOAT))
            nodes.append(helper.make_node("NonZero", [number], list(node.output), name=node.name))
        else:
            if node.op_type == "IsInf" and source in made and types.get(source) == TensorProto.DOUBLE:
                # The cast from float32 is exact, so that it can be left out.
                node.input[0] = made[source].input[0]
            nodes.append(node)
    used = {name for node in nodes for name in node.input} | {output.name for output in model.graph.output}
    kept = [node for node in nodes if node.op_type != "Cast" or node.output[0] in used]
    del model.graph.node[:]
    model.graph.node.extend(kept)


def _bounded(clip: Any) -> "list[onnx.NodeProto]":
    """Return a Clip as Max with its minimum and Min with its maximum; either bound can be missing."""
    from onnx import helper

    bounds = [*clip.input[1:], "", ""][:2]
    steps = [(kind, bound) for kind, bound in zip(("Max", "Min"), bounds, strict=True) if bound]
    if not steps:
        return [helper.make_node("Identity", [clip.input[0]], list(clip.output), name=clip.name)]
    nodes, value = [], clip.input[0]
    for number, (kind, bound) in enumerate(steps, start=1):
        result = clip.output[0] if number == len(steps) else f"{clip.output[0]}_{kind}"
        nodes.append(helper.make_node(kind, [value, bound], [result], name=f"{clip.name}_{kind}"))
        value = result
    return nodes


def _element_types(model: "onnx.ModelProto") -> dict[str, int]:
    """Return the element type of every value whose type can be inferred."""
    from onnx import shape_inference

    graph = shape_inference.infer_shapes(model).graph
    known = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
    return {**{value.name: value.data_type for value in graph.initializer}, **known}
