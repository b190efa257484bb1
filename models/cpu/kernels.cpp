// CPU kernels of decoding. kernels.py builds and calls the library, and documents each function.
//
// Matrices are row-major float32. `Lanes` is a vector of the compiler's extension, as long as a register of the processor.
// In a product, the sums of a tile of four rows by COLUMNS vectors and their operands fill all registers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif

typedef float Lanes __attribute__((vector_size(BYTES)));
typedef int32_t IntLanes __attribute__((vector_size(BYTES)));
typedef float Loose __attribute__((vector_size(BYTES), aligned(4), may_alias));

namespace {

constexpr int64_t LANES = BYTES / sizeof(float);
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int COLUMNS = 4;  // with 32 registers
#else
constexpr int COLUMNS = 3;  // with 16 registers
#endif
constexpr float NONE = -std::numeric_limits<float>::infinity();

// Number of vectors that hold `size` numbers.
int64_t num_lanes(int64_t size) { return (size + LANES - 1) / LANES; }
Lanes load(const float* at) { return *reinterpret_cast<const Loose*>(at); }
void store(float* at, Lanes value) { *reinterpret_cast<Loose*>(at) = value; }

// e^x for x <= 0 (Cephes' polynomial, two units in the last place); 0 below -87.
Lanes exponential(Lanes x) {
    const Lanes magic = Lanes{} + 12582912.0f;  // adding it rounds to whole numbers
    const Lanes shifted = x * 1.44269504f + magic;
    const Lanes n = shifted - magic;
    const Lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const IntLanes exponent = ((IntLanes)shifted - 0x4B400000 + 127) << 23;  // casts keep the bits
    y *= (Lanes)exponent;
    return x < -87.0f ? Lanes{} : y;
}

float maximum(const float* x, int64_t size) {
    float result = NONE;
    int64_t i = 0;
    if (size >= LANES) {
        Lanes maxima = load(x);
        for (i = LANES; i + LANES <= size; i += LANES) {
            const Lanes next = load(x + i);
            maxima = next > maxima ? next : maxima;
        }
        for (int64_t l = 0; l < LANES; l++) result = std::max(result, maxima[l]);
    }
    for (; i < size; i++) result = std::max(result, x[i]);
    return result;
}

float total(Lanes x) {
    float sum = 0;
    for (int64_t i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

float log_sum_exp(const float* x, int64_t size) {
    const float max = maximum(x, size);
    Lanes sum{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sum += exponential(load(x + i) - max);
    if (i < size) {
        float remainder[LANES];
        std::fill_n(remainder, LANES, NONE);
        std::copy_n(x + i, size - i, remainder);
        sum += exponential(load(remainder) - max);
    }
    return max + std::log(total(sum));
}

// Softmax in place. x has room for whole vectors; numbers after its end become 0.
void softmax(float* x, int64_t size) {
    const float max = maximum(x, size);
    std::fill(x + size, x + num_lanes(size) * LANES, NONE);
    Lanes sum{};
    for (int64_t i = 0; i < size; i += LANES) {
        const Lanes weight = exponential(load(x + i) - max);
        store(x + i, weight);
        sum += weight;
    }
    const float scale = 1 / total(sum);
    for (int64_t i = 0; i < size; i += LANES) store(x + i, load(x + i) * scale);
}

float dot(const float* a, const float* b, int64_t size) {
    Lanes sums[4] = {};  // independent chains, as a single sum would wait for each of its results
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int64_t l = 0; l < 4; l++) sums[l] += load(a + i + l * LANES) * load(b + i + l * LANES);
    for (; i + LANES <= size; i += LANES) sums[0] += load(a + i) * load(b + i);
    float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < size; i++) sum += a[i] * b[i];
    return sum;
}

// Four rows of a product: c (4, LANES * lanes) = a (4, depth) b (depth, LANES * lanes); rows of a by pointer.
template <int width = COLUMNS>
void four_rows(const float* const* a, const float* b, int64_t stride_b, int64_t depth, float* c, int64_t stride_c,
               int64_t lanes) {
    for (; lanes >= width; lanes -= width, b += width * LANES, c += width * LANES) {
        Lanes sums[4][width] = {};
        for (int64_t d = 0; d < depth; d++) {
            Lanes right[width];
            for (int l = 0; l < width; l++) right[l] = load(b + d * stride_b + l * LANES);
            for (int r = 0; r < 4; r++)
                for (int l = 0; l < width; l++) sums[r][l] += a[r][d] * right[l];
        }
        for (int r = 0; r < 4; r++)
            for (int l = 0; l < width; l++) store(c + r * stride_c + l * LANES, sums[r][l]);
    }
    if constexpr (width > 1) four_rows<width - 1>(a, b, stride_b, depth, c, stride_c, lanes);
}

// GELU by the error function (Abramowitz and Stegun 7.1.26, error 1.5e-7, as PyTorch on AVX-512).
Lanes gelu(Lanes x) {
    const Lanes y = (x < 0 ? -x : x) * 0.70710678f;
    const Lanes t = 1 / (1 + 0.3275911f * y);
    Lanes tail = 1.061405429f * t - 1.453152027f;
    tail = tail * t + 1.421413741f;
    tail = tail * t - 0.284496736f;
    tail = tail * t + 0.254829592f;
    tail = tail * t * exponential(-y * y);  // 1 - erf(y)
    return 0.5f * x * (x < 0 ? tail : 2 - tail);
}

// One level of a student and of the trie: contributions of earlier codes to the hidden layer, the head, and the edges.
struct Level {
    const float *table, *scale, *shift, *weight, *bias;
    const int64_t *offsets, *tokens;
    const bool* allowed;  // edges that beams may take; null for all
};

// x = GELU(norm(base + sum of table rows)): `width` numbers, padded with zeros to whole vectors.
void activate(const float* base, const int64_t* rows, int64_t count, const Level& level, int64_t width,
              float epsilon, Lanes* x) {
    const int64_t lanes = num_lanes(width), full_lanes = width / LANES, remainder = width % LANES;
    const auto get = [&](const float* at, int64_t l) {
        if (l < full_lanes) return load(at + l * LANES);
        float padded[LANES] = {};
        std::copy_n(at + l * LANES, remainder, padded);
        return load(padded);
    };
    Lanes sum{}, squares{};
    for (int64_t l = 0; l < lanes; l++) {
        Lanes h = get(base, l);
        for (int64_t r = 0; r < count; r++) h += get(level.table + rows[r] * width, l);
        x[l] = h;
        sum += h;
    }
    const float mean = total(sum) / width;
    for (int64_t l = 0; l < lanes; l++) {
        x[l] -= mean;
        for (int64_t i = remainder; l == full_lanes && i < LANES; i++) x[l][i] = 0;
        squares += x[l] * x[l];
    }
    const float scale = 1 / std::sqrt(total(squares) / width + epsilon);
    for (int64_t l = 0; l < lanes; l++) x[l] = gelu(x[l] * scale * get(level.scale, l) + get(level.shift, l));
}

struct Candidate {
    float score;
    int64_t edge, parent;
};

bool has_lower_edge(const Candidate& a, const Candidate& b) { return a.edge < b.edge; }
bool is_better(const Candidate& a, const Candidate& b) {
    return a.score > b.score || (a.score == b.score && has_lower_edge(a, b));
}

}  // namespace

extern "C" {

void packed_attention(const float* qkv, const int64_t* begin, int64_t users, int64_t heads, int64_t width,
                      const float* bias, int64_t span, float* out) {
    const int64_t inner = heads * width, row = 3 * inner, width_lanes = num_lanes(width);
#pragma omp parallel
    {
        std::vector<Lanes> keys, values, scores, mixed(4 * width_lanes);
#pragma omp for collapse(2) schedule(dynamic, 4)
        for (int64_t user = 0; user < users; user++)
            for (int64_t head = 0; head < heads; head++) {
                const int64_t size = begin[user + 1] - begin[user], size_lanes = num_lanes(size);
                const int64_t stride = size_lanes * LANES, value_stride = width_lanes * LANES;
                const float* q = qkv + begin[user] * row + head * width;
                keys.assign(width * size_lanes, Lanes{});    // (width, size), padded
                values.assign(size * width_lanes, Lanes{});  // (size, width), padded
                scores.resize(4 * size_lanes);
                float *key = reinterpret_cast<float*>(keys.data()), *value = reinterpret_cast<float*>(values.data());
                float *score = reinterpret_cast<float*>(scores.data()), *mix = reinterpret_cast<float*>(mixed.data());
                for (int64_t j = 0; j < size; j++) {
                    const float* k = q + j * row + inner;
                    for (int64_t d = 0; d < width; d++) key[d * stride + j] = k[d];
                    std::copy_n(k + inner, width, value + j * value_stride);
                }
                for (int64_t i = 0; i < size; i += 4) {
                    const float *query_rows[4], *weight_rows[4];
                    for (int64_t r = 0; r < 4; r++) {
                        query_rows[r] = q + std::min(i + r, size - 1) * row;  // the last row again after the end
                        weight_rows[r] = score + r * stride;
                    }
                    four_rows(query_rows, key, stride, width, score, stride, size_lanes);
                    for (int64_t r = 0; r < 4 && i + r < size; r++) {
                        float* s = score + r * stride;
                        const float* b = bias + (head * span + i + r) * span;
                        for (int64_t j = 0; j < size; j++) s[j] += b[j];
                        softmax(s, size);
                    }
                    four_rows(weight_rows, value, value_stride, size, mix, value_stride, width_lanes);
                    for (int64_t r = 0; r < 4 && i + r < size; r++)
                        std::copy_n(mix + r * value_stride, width, out + (begin[user] + i + r) * inner + head * width);
                }
            }
    }
}

void scaled_rows(const float* x, int64_t rows, int64_t width, float epsilon, float* out) {
#pragma omp parallel for if (rows > 64)
    for (int64_t r = 0; r < rows; r++) {
        const float* row = x + r * width;
        const float scale = 1 / std::sqrt(dot(row, row, width) / width + epsilon);
#pragma omp simd
        for (int64_t d = 0; d < width; d++) out[r * width + d] = row[d] * scale;
    }
}

void beam_attention(const float* queries, const float* const* codes, const int64_t* const* code_rows, int64_t levels,
                    int64_t beams, int64_t heads, int64_t width, const float* bias, float* out) {
    const int64_t inner = heads * width, row = 2 * inner;
#pragma omp parallel for
    for (int64_t beam = 0; beam < beams; beam++) {
        std::vector<float> weights(num_lanes(levels) * LANES);
        for (int64_t head = 0; head < heads; head++) {
            const float* q = queries + beam * inner + head * width;
            for (int64_t t = 0; t < levels; t++)
                weights[t] = dot(q, codes[t] + code_rows[t][beam] * row + head * width, width) + bias[head * levels + t];
            softmax(weights.data(), levels);
            float* mixed = out + beam * inner + head * width;
            std::fill_n(mixed, width, 0.0f);
            for (int64_t t = 0; t < levels; t++) {
                const float* v = codes[t] + code_rows[t][beam] * row + head * width + inner;
                const float weight = weights[t];
#pragma omp simd
                for (int64_t d = 0; d < width; d++) mixed[d] += weight * v[d];
            }
        }
    }
}

void log_softmax_part(const float* logits, int64_t rows, int64_t width, int64_t first, int64_t size, float* out) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const float log_sum = log_sum_exp(logits + r * width, width);
        for (int64_t c = 0; c < size; c++) out[r * size + c] = logits[r * width + first + c] - log_sum;
    }
}

void beam_search(const float* hidden, const Level* levels, const int64_t* sizes, int64_t depth, int64_t users, int64_t width,
                 float epsilon, int64_t beam, int64_t keep, bool children, int64_t* best_node, float* best_score) {
#pragma omp parallel
    {
        std::vector<Lanes> active(num_lanes(width));
        const float* x = reinterpret_cast<const float*>(active.data());
        std::vector<Candidate> beams, candidates;  // the edge of a beam is its node
        std::vector<int64_t> rows, parent_rows;    // (beams, level): table rows of each beam's codes
        std::vector<float> scores;
#pragma omp for schedule(dynamic)
        for (int64_t user = 0; user < users; user++) {
            beams.assign(1, {0, 0, 0});
            rows.clear();
            int64_t first_row = 0;  // table row of the level's first code
            for (int64_t d = 0; d < depth; d++) {
                const Level& level = levels[d];
                const bool all_codes = d == 0 || !children, is_last = d + 1 == depth;
                candidates.clear();
                for (int64_t b = 0; b < int64_t(beams.size()); b++) {
                    const int64_t begin = level.offsets[beams[b].edge], end = level.offsets[beams[b].edge + 1];
                    if (!all_codes && end - begin == 1) {  // the only child has probability 1
                        candidates.push_back({beams[b].score, begin, b});
                        continue;
                    }
                    activate(hidden + (user * depth + d) * width, rows.data() + b * d, d, level, width,
                             epsilon, active.data());
                    scores.resize(all_codes ? sizes[d] : end - begin);
                    for (int64_t i = 0; i < int64_t(scores.size()); i++) {
                        const int64_t code = all_codes ? i : level.tokens[begin + i];
                        scores[i] = dot(level.weight + code * width, x, width) + level.bias[code];
                    }
                    const float log_sum = log_sum_exp(scores.data(), scores.size());
                    for (int64_t e = begin; e < end; e++) {
                        const float log_prob = scores[all_codes ? level.tokens[e] : e - begin] - log_sum;
                        const float score = beams[b].score + log_prob;
                        const bool is_allowed = !level.allowed || level.allowed[e];
                        if (is_allowed && score > NONE) candidates.push_back({score, e, b});  // false for NaN
                    }
                }
                const int64_t num_candidates = candidates.size();
                const int64_t num_beams = std::min(is_last ? keep : beam, num_candidates);
                if (num_beams < num_candidates)
                    std::nth_element(candidates.begin(), candidates.begin() + num_beams, candidates.end(), is_better);
                candidates.resize(num_beams);
                std::sort(candidates.begin(), candidates.end(), is_last ? is_better : has_lower_edge);
                parent_rows.swap(rows);
                rows.clear();
                for (int64_t b = 0; b < num_beams && !is_last; b++) {
                    const auto path = parent_rows.begin() + candidates[b].parent * d;
                    rows.insert(rows.end(), path, path + d);
                    rows.push_back(first_row + level.tokens[candidates[b].edge]);
                }
                first_row += sizes[d];
                beams.swap(candidates);
            }
            for (int64_t i = 0; i < keep; i++) {
                const bool exists = i < int64_t(beams.size());
                best_node[user * keep + i] = exists ? beams[i].edge : 0;
                best_score[user * keep + i] = exists ? beams[i].score : NONE;
            }
        }
    }
}
}
