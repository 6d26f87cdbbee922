/* Copies rows of tables of integers: see tables.py. */

#include <stdint.h>
#include <string.h>

/* Row rows[i] of `from` becomes row places[i] of `to`. */
void gpuflow_copy_rows(const int64_t *from, const int64_t *rows, int64_t *to, const int64_t *places, int64_t count,
                       int64_t columns) {
    for (int64_t i = 0; i < count; i++)
        memcpy(to + places[i] * columns, from + rows[i] * columns, (size_t)columns * sizeof *to);
}
