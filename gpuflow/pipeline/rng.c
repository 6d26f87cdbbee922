/* Philox4x32-10 for many samples, see rng.py: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. */

#include <stdint.h>

enum { ROUNDS = 10 };

/* Writes `blocks` blocks of four words for each sample, words [count, blocks, 4]: of 32 bits in 64. */
void gpuflow_random_words(const int64_t *positions, int64_t count, int64_t blocks, uint64_t epoch, uint64_t key,
                          uint64_t *words) {
    for (int64_t i = 0; i < count; i++) {
        for (int64_t block = 0; block < blocks; block++, words += 4) {
            uint64_t place = (uint64_t)positions[i];
            uint64_t a = (uint32_t)place, b = place >> 32, c = epoch, d = (uint64_t)block;
            uint32_t first = (uint32_t)key, second = (uint32_t)(key >> 32);
            for (int turn = 0; turn < ROUNDS; turn++, first += 0x9E3779B9, second += 0xBB67AE85) {
                uint64_t of_a = a * 0xD2511F53, of_c = c * 0xCD9E8D57;
                a = of_c >> 32 ^ b ^ first;
                b = (uint32_t)of_c;
                c = of_a >> 32 ^ d ^ second;
                d = (uint32_t)of_a;
            }
            words[0] = a;
            words[1] = b;
            words[2] = c;
            words[3] = d;
        }
    }
}
