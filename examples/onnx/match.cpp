// Match two images with ONNX Runtime. Usage: match FOLDER A.ppm B.ppm [COUNT]
//
// The output has one line per match, best first: x0 y0 x1 y1 score exact. FOLDER contains features.onnx and pair.onnx,
// written by `dualrc export onnx FOLDER`. Images are binary PPM files (P6, 8 bits per channel). They are cropped to
// multiples of 16 and not resized, so resize large images first.

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

struct Image {
    int64_t width = 0, height = 0;
    // Red, green and blue planes, each row by row, in 0 to 255.
    std::vector<float> planes;
};

// Read the next number of a PPM header and skip comments, which extend from # to the end of the line.
static int64_t read_number(std::istream& file) {
    while (file >> std::ws && file.peek() == '#') {
        std::string comment;
        std::getline(file, comment);
    }
    int64_t number = 0;
    if (!(file >> number)) throw std::runtime_error("not a binary PPM file");
    return number;
}

static Image read_ppm(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string magic(2, ' ');
    if (!file.read(magic.data(), 2) || magic != "P6") throw std::runtime_error(path + " is not a binary PPM file");
    const int64_t width = read_number(file), height = read_number(file), levels = read_number(file);
    // A single white space precedes the pixels.
    file.get();
    Image image;
    image.width = width / 16 * 16;
    image.height = height / 16 * 16;
    if (levels != 255 || image.width < 32 || image.height < 32 || width > 1 << 14 || height > 1 << 14) {
        throw std::runtime_error(path + ": the image must have 8 bits per channel and sides of 32 to 16384 pixels");
    }
    std::vector<uint8_t> pixels(static_cast<size_t>(3 * width * height));
    if (!file.read(reinterpret_cast<char*>(pixels.data()), static_cast<std::streamsize>(pixels.size()))) {
        throw std::runtime_error(path + " ends too early");
    }
    image.planes.resize(static_cast<size_t>(3 * image.width * image.height));
    for (int64_t color = 0; color < 3; ++color) {
        for (int64_t y = 0; y < image.height; ++y) {
            for (int64_t x = 0; x < image.width; ++x) {
                image.planes[static_cast<size_t>((color * image.height + y) * image.width + x)] =
                    pixels[static_cast<size_t>((y * width + x) * 3 + color)];
            }
        }
    }
    return image;
}

// Session with the names of its inputs and outputs.
class Model {
public:
    Model(Ort::Env& env, const std::string& path, const Ort::SessionOptions& options)
        : session_(env, std::basic_string<ORTCHAR_T>(path.begin(), path.end()).c_str(), options) {
        Ort::AllocatorWithDefaultOptions allocator;
        for (size_t i = 0; i < session_.GetInputCount(); ++i) {
            inputs_.emplace_back(session_.GetInputNameAllocated(i, allocator).get());
        }
        for (size_t i = 0; i < session_.GetOutputCount(); ++i) {
            outputs_.emplace_back(session_.GetOutputNameAllocated(i, allocator).get());
        }
    }

    const std::vector<std::string>& inputs() const { return inputs_; }
    const std::vector<std::string>& outputs() const { return outputs_; }

    // Run the model with values in the order of `inputs`; return results in the order of `outputs`.
    std::vector<Ort::Value> run(const std::vector<Ort::Value>& values) {
        std::vector<const char*> in, out;
        for (const auto& name : inputs_) in.push_back(name.c_str());
        for (const auto& name : outputs_) out.push_back(name.c_str());
        return session_.Run(Ort::RunOptions{nullptr}, in.data(), values.data(), values.size(), out.data(), out.size());
    }

private:
    Ort::Session session_;
    std::vector<std::string> inputs_, outputs_;
};

static std::vector<Ort::Value> extract(Model& features, Image& image) {
    const int64_t shape[] = {1, 3, image.height, image.width};
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    std::vector<Ort::Value> inputs;
    inputs.push_back(Ort::Value::CreateTensor<float>(memory, image.planes.data(), image.planes.size(), shape, 4));
    return features.run(inputs);
}

static size_t index_of(const std::vector<std::string>& names, const std::string& name) {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) throw std::runtime_error("the models have no " + name + "; export both again");
    return static_cast<size_t>(found - names.begin());
}

static void match(const std::string& folder, const std::string& path0, const std::string& path1, int64_t most) {
    Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "dualrc");
    Ort::SessionOptions options;
    Model features(env, folder + "/features.onnx", options), pair(env, folder + "/pair.onnx", options);
    Image image0 = read_ppm(path0), image1 = read_ppm(path1);
    std::vector<Ort::Value> maps[] = {extract(features, image0), extract(features, image1)};
    // The input coarse0 is the output coarse of image 0, and so on.
    std::vector<Ort::Value> inputs;
    for (const auto& name : pair.inputs()) {
        auto& own = maps[name.back() - '0'];
        inputs.push_back(std::move(own[index_of(features.outputs(), name.substr(0, name.size() - 1))]));
    }
    const auto found = pair.run(inputs);
    const auto column = [&](const char* name) -> const Ort::Value& { return found[index_of(pair.outputs(), name)]; };
    const float* points0 = column("points0").GetTensorData<float>();
    const float* points1 = column("points1").GetTensorData<float>();
    const float* scores = column("scores").GetTensorData<float>();
    const bool* exact = column("exact").GetTensorData<bool>();
    const int64_t count = std::min(most, *column("count").GetTensorData<int64_t>());
    for (int64_t i = 0; i < count; ++i) {
        std::printf("%.4f %.4f %.4f %.4f %.6f %d\n", points0[2 * i], points0[2 * i + 1], points1[2 * i],
                    points1[2 * i + 1], scores[i], exact[i] ? 1 : 0);
    }
}

int main(int argc, char** argv) {
    if (argc < 4) {
        std::fprintf(stderr, "usage: %s FOLDER A.ppm B.ppm [COUNT]\n", argv[0]);
        return 2;
    }
    try {
        match(argv[1], argv[2], argv[3], argc > 4 ? std::atoll(argv[4]) : INT64_MAX);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
