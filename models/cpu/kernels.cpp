// What decoding does between its matrix products on a CPU; kernels.py builds and calls it and says what each does.
//
// Matrices are row-major float32. Vectors are of the compiler's own type, as long as the processor's registers; a tile of
// four rows by COLUMNS vectors of sums, with what is multiplied, fills them.

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
constexpr int COLUMNS = 4;  // of 32 registers
#else
constexpr int COLUMNS = 3;  // of 16
#endif
constexpr float NONE = -std::numeric_limits<float>::infinity();

int64_t lanes_of(int64_t size) { return (size + LANES - 1) / LANES; }
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

float largest(const float* x, int64_t size) {
    float most = NONE;
    int64_t i = 0;
    if (size >= LANES) {
        Lanes best = load(x);
        for (i = LANES; i + LANES <= size; i += LANES) {
            const Lanes next = load(x + i);
            best = next > best ? next : best;
        }
        for (int64_t l = 0; l < LANES; l++) most = std::max(most, best[l]);
    }
    for (; i < size; i++) most = std::max(most, x[i]);
    return most;
}

float total(Lanes x) {
    float sum = 0;
    for (int64_t i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

float log_sum_exp(const float* x, int64_t size) {
    const float most = largest(x, size);
    Lanes sum{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sum += exponential(load(x + i) - most);
    if (i < size) {
        float rest[LANES];
        std::fill_n(rest, LANES, NONE);
        std::copy_n(x + i, size - i, rest);
        sum += exponential(load(rest) - most);
    }
    return most + std::log(total(sum));
}

// In place; x has room for whole lanes, and what is past its end becomes 0.
void softmax(float* x, int64_t size) {
    const float most = largest(x, size);
    std::fill(x + size, x + lanes_of(size) * LANES, NONE);
    Lanes sum{};
    for (int64_t i = 0; i < size; i += LANES) {
        const Lanes share = exponential(load(x + i) - most);
        store(x + i, share);
        sum += share;
    }
    const float scale = 1 / total(sum);
    for (int64_t i = 0; i < size; i += LANES) store(x + i, load(x + i) * scale);
}

float dot(const float* a, const float* b, int64_t size) {
    Lanes sums[4] = {};  // of four chains, as one would wait for its own results
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

// GELU by the error function (Abramowitz and Stegun 7.1.26, to 1.5e-7, as torch's own on AVX-512).
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

// One level of a student and of a trie: the table of what codes before add to the hidden layer, the head, the edges.
struct Level {
    const float *table, *scale, *shift, *weight, *bias;
    const int64_t *offsets, *tokens;
    const bool* allowed;  // edges that beams may take; null: all
};

// x = GELU(norm(base + the rows)), `width` numbers, then zeros to whole lanes.
void activate(const float* base, const int64_t* rows, int64_t count, const Level& level, int64_t width,
              float epsilon, Lanes* x) {
    const int64_t lanes = lanes_of(width), whole = width / LANES, rest = width % LANES;
    const auto get = [&](const float* at, int64_t l) {
        if (l < whole) return load(at + l * LANES);
        float padded[LANES] = {};
        std::copy_n(at + l * LANES, rest, padded);
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
        for (int64_t i = rest; l == whole && i < LANES; i++) x[l][i] = 0;
        squares += x[l] * x[l];
    }
    const float scale = 1 / std::sqrt(total(squares) / width + epsilon);
    for (int64_t l = 0; l < lanes; l++) x[l] = gelu(x[l] * scale * get(level.scale, l) + get(level.shift, l));
}

struct Candidate {
    float score;
    int64_t edge, parent;
};

bool earlier(const Candidate& a, const Candidate& b) { return a.edge < b.edge; }
bool better(const Candidate& a, const Candidate& b) {
    return a.score > b.score || (a.score == b.score && earlier(a, b));
}

}  // namespace

extern "C" {

void packed_attention(const float* qkv, const int64_t* begin, int64_t users, int64_t heads, int64_t width,
                      const float* bias, int64_t span, float* out) {
    const int64_t inner = heads * width, row = 3 * inner, wide = lanes_of(width);
#pragma omp parallel
    {
        std::vector<Lanes> keys, values(0), scores, mixed(4 * wide);
#pragma omp for collapse(2) schedule(dynamic, 4)
        for (int64_t user = 0; user < users; user++)
            for (int64_t head = 0; head < heads; head++) {
                const int64_t size = begin[user + 1] - begin[user], long_ = lanes_of(size), stride = long_ * LANES;
                const float* q = qkv + begin[user] * row + head * width;
                keys.assign(width * long_, Lanes{});  // (width, size), padded
                values.assign(size * wide, Lanes{});  // (size, width), padded
                scores.resize(4 * long_);
                float *key = reinterpret_cast<float*>(keys.data()), *value = reinterpret_cast<float*>(values.data());
                float *score = reinterpret_cast<float*>(scores.data()), *mix = reinterpret_cast<float*>(mixed.data());
                for (int64_t j = 0; j < size; j++) {
                    const float* k = q + j * row + inner;
                    for (int64_t d = 0; d < width; d++) key[d * stride + j] = k[d];
                    std::copy_n(k + inner, width, value + j * wide * LANES);
                }
                for (int64_t i = 0; i < size; i += 4) {
                    const float *asked[4], *shares[4];
                    for (int64_t r = 0; r < 4; r++) {
                        asked[r] = q + std::min(i + r, size - 1) * row;  // past the end the last row again
                        shares[r] = score + r * stride;
                    }
                    four_rows(asked, key, stride, width, score, stride, long_);
                    for (int64_t r = 0; r < 4 && i + r < size; r++) {
                        float* s = score + r * stride;
                        const float* b = bias + (head * span + i + r) * span;
                        for (int64_t j = 0; j < size; j++) s[j] += b[j];
                        softmax(s, size);
                    }
                    four_rows(shares, value, wide * LANES, size, mix, wide * LANES, wide);
                    for (int64_t r = 0; r < 4 && i + r < size; r++)
                        std::copy_n(mix + r * wide * LANES, width, out + (begin[user] + i + r) * inner + head * width);
                }
            }
    }
}

void packed_readout(const float* queries, const float* states, const int64_t* begin, int64_t users, int64_t heads,
                    int64_t width, float* out) {
#pragma omp parallel
    {
        std::vector<float> share;
#pragma omp for collapse(2) schedule(dynamic, 4)
        for (int64_t user = 0; user < users; user++)
            for (int64_t head = 0; head < heads; head++) {
                const int64_t size = begin[user + 1] - begin[user];
                const float *q = queries + (user * heads + head) * width, *own = states + begin[user] * width;
                float* mixed = out + (user * heads + head) * width;
                share.resize(lanes_of(size) * LANES);
                for (int64_t j = 0; j < size; j++) share[j] = dot(q, own + j * width, width);
                softmax(share.data(), size);
                std::fill_n(mixed, width, 0.0f);
                for (int64_t j = 0; j < size; j++) {
                    const float* v = own + j * width;
                    const float weight = share[j];
#pragma omp simd
                    for (int64_t d = 0; d < width; d++) mixed[d] += weight * v[d];
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

void beam_attention(const float* queries, const float* const* codes, const int64_t* const* places, int64_t levels,
                    int64_t rows, int64_t heads, int64_t width, const float* bias, float* out) {
    const int64_t inner = heads * width, row = 2 * inner;
#pragma omp parallel for
    for (int64_t beam = 0; beam < rows; beam++) {
        std::vector<float> share(lanes_of(levels) * LANES);
        for (int64_t head = 0; head < heads; head++) {
            const float* q = queries + beam * inner + head * width;
            for (int64_t t = 0; t < levels; t++)
                share[t] = dot(q, codes[t] + places[t][beam] * row + head * width, width) + bias[head * levels + t];
            softmax(share.data(), levels);
            float* mixed = out + beam * inner + head * width;
            std::fill_n(mixed, width, 0.0f);
            for (int64_t t = 0; t < levels; t++) {
                const float* v = codes[t] + places[t][beam] * row + head * width + inner;
                const float weight = share[t];
#pragma omp simd
                for (int64_t d = 0; d < width; d++) mixed[d] += weight * v[d];
            }
        }
    }
}

void log_softmax_part(const float* logits, int64_t rows, int64_t width, int64_t first, int64_t size, float* out) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const float all = log_sum_exp(logits + r * width, width);
        for (int64_t c = 0; c < size; c++) out[r * size + c] = logits[r * width + first + c] - all;
    }
}

void beam_search(const float* hidden, const Level* levels, const int64_t* sizes, int64_t depth, int64_t users, int64_t width,
          float epsilon, int64_t beam, int64_t keep, bool children, int64_t* best_node, float* best_score) {
#pragma omp parallel
    {
        std::vector<Lanes> active(lanes_of(width));
        const float* x = reinterpret_cast<const float*>(active.data());
        std::vector<Candidate> beams, found;  // of the beams, the edge is the node that they stand at
        std::vector<int64_t> rows, before;    // (beams, level): table rows of each beam's codes
        std::vector<float> scores;
#pragma omp for schedule(dynamic)
        for (int64_t user = 0; user < users; user++) {
            beams.assign(1, {0, 0, 0});
            rows.clear();
            int64_t first_row = 0;  // of the level's codes
            for (int64_t d = 0; d < depth; d++) {
                const Level& level = levels[d];
                const bool all_codes = d == 0 || !children, last = d + 1 == depth;
                found.clear();
                for (int64_t b = 0; b < int64_t(beams.size()); b++) {
                    const int64_t begin = level.offsets[beams[b].edge], end = level.offsets[beams[b].edge + 1];
                    if (!all_codes && end - begin == 1) {  // the only child has probability 1
                        found.push_back({beams[b].score, begin, b});
                        continue;
                    }
                    activate(hidden + (user * depth + d) * width, rows.data() + b * d, d, level, width,
                             epsilon, active.data());
                    scores.resize(all_codes ? sizes[d] : end - begin);
                    for (int64_t i = 0; i < int64_t(scores.size()); i++) {
                        const int64_t code = all_codes ? i : level.tokens[begin + i];
                        scores[i] = dot(level.weight + code * width, x, width) + level.bias[code];
                    }
                    const float all = log_sum_exp(scores.data(), scores.size());
                    for (int64_t e = begin; e < end; e++) {
                        const float value = beams[b].score + (scores[all_codes ? level.tokens[e] : e - begin] - all);
                        const bool free = !level.allowed || level.allowed[e];
                        if (free && value > NONE) found.push_back({value, e, b});  // no NaN either
                    }
                }
                const int64_t kept = std::min(last ? keep : beam, int64_t(found.size()));
                if (kept < int64_t(found.size())) std::nth_element(found.begin(), found.begin() + kept, found.end(), better);
                found.resize(kept);
                std::sort(found.begin(), found.end(), last ? better : earlier);
                before.swap(rows);
                rows.clear();
                for (int64_t b = 0; b < kept && !last; b++) {
                    const auto path = before.begin() + found[b].parent * d;
                    rows.insert(rows.end(), path, path + d);
                    rows.push_back(first_row + level.tokens[found[b].edge]);
                }
                first_row += sizes[d];
                beams.swap(found);
            }
            for (int64_t i = 0; i < keep; i++) {
                const bool there = i < int64_t(beams.size());
                best_node[user * keep + i] = there ? beams[i].edge : 0;
                best_score[user * keep + i] = there ? beams[i].score : NONE;
            }
        }
    }
}
}
