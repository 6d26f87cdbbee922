/* Run by test_hostile_files.py under the compiler's sanitizers: C code that reads files, on files that were changed.
 *
 * Arguments: how often each file is changed, then files. Each changed file is in memory of exactly its size,
 * so that a read or write next to it is found. Prints how many files were taken by each function, and of how many.
 */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void gpuflow_headers(const uint8_t *, const int64_t *, const int64_t *, int64_t, int64_t, int64_t, int64_t *);
void gpuflow_baseline(int64_t *, int64_t, int64_t, int64_t);
void gpuflow_complete(const int64_t *, int64_t, int64_t, uint8_t *);

enum { KIND, HEIGHT, WIDTH, ORIENTATION, SAMPLING, SCAN, INTERVAL, COLUMNS }; /* as in header_scan.c */
enum { BASELINE = 1 };

static uint8_t *changed(const uint8_t *data, int64_t size, int64_t *length) {
    int64_t kept = rand() % 4 ? size : rand() % size;
    uint8_t *copy = malloc((size_t)(kept ? kept : 1));
    memcpy(copy, data, (size_t)kept);
    if (kept > 4 && rand() % 2) {
        copy[kept - 2] = 0xFF;
        copy[kept - 1] = 0xD9;
    }
    if (kept > 4 && rand() % 4 == 0) /* a segment whose length is cut off */
        memcpy(copy + kept - 3, "\xFF\xE1", 3);
    int64_t most = rand() % 3 || kept < 700 ? kept : 700;
    for (int times = rand() % 5; times > 0 && most; times--)
        copy[rand() % most] = (uint8_t)(rand() % 3 ? rand() : rand() % 2 ? 0xFF : 0);
    *length = kept;
    return copy;
}

/* What complete.py describes of a file whose header was read. */
static int is_complete(const uint8_t *file, int64_t size, const int64_t *header) {
    int64_t across = header[SAMPLING] >> 4, down = header[SAMPLING] & 15, interval = header[INTERVAL];
    across = across ? across : 1;
    down = down ? down : 1;
    int64_t units = (header[WIDTH] + 8 * across - 1) / (8 * across) * ((header[HEIGHT] + 8 * down - 1) / (8 * down));
    int64_t restarts = interval ? (units + interval - 1) / interval - 1 : 0;
    int64_t described[10] = {(int64_t)(uintptr_t)file, size, header[SCAN], header[SAMPLING] ? 3 : 1, across * down, units,
                             interval, restarts};
    uint8_t found = 0;
    if (2 * restarts < size)
        gpuflow_complete(described, 1, 1, &found);
    return found;
}

int main(int count, char **arguments) {
    long all = 0, ordinary = 0, complete = 0, rewritten = 0;
    srand(3);
    for (int number = 2; number < count; number++) {
        FILE *file = fopen(arguments[number], "rb");
        static uint8_t data[1 << 20];
        int64_t size = file ? (int64_t)fread(data, 1, sizeof data, file) : 0;
        if (size < 4)
            return 1;
        fclose(file);
        for (int turn = atoi(arguments[1]); turn > 0; turn--, all++) {
            int64_t length, offset = 0, header[COLUMNS] = {0};
            uint8_t *copy = changed(data, size, &length);
            gpuflow_headers(copy, &offset, &length, 1, rand() % 2, rand() % 2 ? 100 : rand() % 12, header);
            if (header[KIND] == BASELINE) {
                ordinary++;
                complete += is_complete(copy, length, header);
            }
            int64_t room = rand() % 5 ? length * 5 / 4 + 4096 : rand() % (length * 5 / 4 + 4096);
            uint8_t *target = malloc((size_t)(room ? room : 1));
            int64_t one[5] = {(int64_t)(uintptr_t)copy, length, (int64_t)(uintptr_t)target, room, 0};
            gpuflow_baseline(one, 1, 1, rand() % 3);
            rewritten += one[4] > 0;
            free(target);
            free(copy);
        }
    }
    printf("%ld %ld %ld %ld\n", ordinary, complete, rewritten, all);
    return 0;
}
