/* Random numbers and the permutation of rng.py, for many samples at a time. rng.py names the algorithms' sources. */

#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { ROUNDS = 10, TURNS = 8 }; /* of Philox; of the permutation, as in rng.py */

static const uint64_t FACTOR_A = 0xD2511F53, FACTOR_C = 0xCD9E8D57;
static const uint32_t STEP_FIRST = 0x9E3779B9, STEP_SECOND = 0xBB67AE85; /* of the two halves of the key */

/* Philox4x32-10, of any number of samples. See gpuflow_random_numbers. */
static void draw(const int64_t *positions, int64_t count, int64_t blocks, uint64_t epoch, uint64_t key,
                 double *numbers) {
    for (int64_t i = 0; i < count; i++) {
        for (int64_t block = 0; block < blocks; block++, numbers += 4) {
            uint64_t place = (uint64_t)positions[i];
            uint64_t a = (uint32_t)place, b = place >> 32, c = epoch, d = (uint64_t)block;
            uint32_t first = (uint32_t)key, second = (uint32_t)(key >> 32);
            for (int turn = 0; turn < ROUNDS; turn++, first += STEP_FIRST, second += STEP_SECOND) {
                uint64_t of_a = a * FACTOR_A, of_c = c * FACTOR_C;
                a = of_c >> 32 ^ b ^ first;
                b = (uint32_t)of_c;
                c = of_a >> 32 ^ d ^ second;
                d = (uint32_t)of_a;
            }
            numbers[0] = (double)a * 0x1p-32;
            numbers[1] = (double)b * 0x1p-32;
            numbers[2] = (double)c * 0x1p-32;
            numbers[3] = (double)d * 0x1p-32;
        }
    }
}

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))

/* Words of 32 bits as numbers in [0, 1). A double of 2^52 has a word in its lowest bits. */
AVX2 static __m256d fractions(__m256i words) {
    __m256d above = _mm256_castsi256_pd(_mm256_or_si256(words, _mm256_set1_epi64x(0x4330000000000000)));
    return _mm256_mul_pd(_mm256_sub_pd(above, _mm256_set1_pd(0x1p52)), _mm256_set1_pd(0x1p-32));
}

/* As `draw`, four samples at a time. The epoch has 32 bits. */
AVX2 static void draw_fast(const int64_t *positions, int64_t count, int64_t blocks, uint64_t epoch, uint64_t key,
                           double *numbers) {
    const __m256i low = _mm256_set1_epi64x(0xFFFFFFFF);
    const __m256i factor_a = _mm256_set1_epi64x((int64_t)FACTOR_A), factor_c = _mm256_set1_epi64x((int64_t)FACTOR_C);
    const int64_t size = blocks * 4;
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        const __m256i place = _mm256_loadu_si256((const __m256i *)(positions + i));
        for (int64_t block = 0; block < blocks; block++) {
            __m256i a = _mm256_and_si256(place, low), b = _mm256_srli_epi64(place, 32);
            __m256i c = _mm256_set1_epi64x((int64_t)epoch), d = _mm256_set1_epi64x(block);
            uint32_t first = (uint32_t)key, second = (uint32_t)(key >> 32);
            for (int turn = 0; turn < ROUNDS; turn++, first += STEP_FIRST, second += STEP_SECOND) {
                __m256i of_a = _mm256_mul_epu32(a, factor_a), of_c = _mm256_mul_epu32(c, factor_c);
                a = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(of_c, 32), b), _mm256_set1_epi64x(first));
                b = _mm256_and_si256(of_c, low);
                c = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(of_a, 32), d), _mm256_set1_epi64x(second));
                d = _mm256_and_si256(of_a, low);
            }
            __m256d w = fractions(a), x = fractions(b), y = fractions(c), z = fractions(d);
            __m256d wx_even = _mm256_unpacklo_pd(w, x), wx_odd = _mm256_unpackhi_pd(w, x);
            __m256d yz_even = _mm256_unpacklo_pd(y, z), yz_odd = _mm256_unpackhi_pd(y, z);
            double *to = numbers + i * size + block * 4;
            _mm256_storeu_pd(to, _mm256_permute2f128_pd(wx_even, yz_even, 0x20));
            _mm256_storeu_pd(to + size, _mm256_permute2f128_pd(wx_odd, yz_odd, 0x20));
            _mm256_storeu_pd(to + 2 * size, _mm256_permute2f128_pd(wx_even, yz_even, 0x31));
            _mm256_storeu_pd(to + 3 * size, _mm256_permute2f128_pd(wx_odd, yz_odd, 0x31));
        }
    }
    draw(positions + i, count - i, blocks, epoch, key, numbers + i * size);
}
#endif

/* Writes `blocks` blocks of four numbers for each sample, [count, blocks, 4]: each has 32 random bits, in [0, 1).
 * fast: use what not every processor has. */
void gpuflow_random_numbers(const int64_t *positions, int64_t count, int64_t blocks, uint64_t epoch, uint64_t key,
                            int64_t fast, double *numbers) {
#if defined(__x86_64__)
    if (fast && epoch >> 32 == 0 && __builtin_cpu_supports("avx2")) {
        draw_fast(positions, count, blocks, epoch, key, numbers);
        return;
    }
#endif
    (void)fast;
    draw(positions, count, blocks, epoch, key, numbers);
}

/* SplitMix64's finaliser. */
static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

/* The sum of two numbers below `size`, modulo `size`. A division takes longer. */
static uint64_t sum_below(uint64_t size, uint64_t a, uint64_t b) { return a + b < size ? a + b : a + b - size; }

/* Maps each of the values, which are below `size`, by the permutation of `key`: an alternating Feistel network over
 * `left_size` * `right_size` values, repeated where it leads to `size` or above. */
void gpuflow_permute(uint64_t *values, int64_t count, uint64_t size, uint64_t left_size, uint64_t right_size,
                     uint64_t key) {
    uint64_t keys[TURNS];
    for (int turn = 0; turn < TURNS; turn++)
        keys[turn] = mix((uint64_t)(turn + 1) * 0x9E3779B97F4A7C15 + key);
    for (int64_t i = 0; i < count; i++) {
        do {
            uint64_t left = values[i] / right_size, right = values[i] % right_size;
            for (int turn = 0; turn < TURNS; turn += 2) {
                left = sum_below(left_size, left, mix(right ^ keys[turn]) % left_size);
                right = sum_below(right_size, right, mix(left ^ keys[turn + 1]) % right_size);
            }
            values[i] = left * right_size + right;
        } while (values[i] >= size);
    }
}
