/* Random numbers and the permutation of rng.py, for many samples at a time. rng.py names the algorithms' sources. */

#include <stdint.h>

enum { ROUNDS = 10, TURNS = 8 }; /* of Philox; of the permutation, as in rng.py */

static const uint64_t FACTOR_A = 0xD2511F53, FACTOR_C = 0xCD9E8D57;
static const uint32_t STEP_FIRST = 0x9E3779B9, STEP_SECOND = 0xBB67AE85; /* of the two halves of the key */

/* Writes `blocks` blocks of four numbers in [0, 1) for each sample, [count, blocks, 4], by Philox4x32-10. Each number
 * has 32 random bits. */
void gpuflow_random_numbers(const int64_t *positions, int64_t count, int64_t blocks, uint64_t epoch, uint64_t key,
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
