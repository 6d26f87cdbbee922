/* Prints hashes of what the C library makes of random images and parameters, which are the same on every processor.
 * test_platforms.py compiles it together with gpuflow/native/. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "color.h"
#include "local.h"
#include "resample.h"
#include "rounding.h"
#include "warp.h"

int64_t gpuflow_draw_outline(const double *outline, int64_t count, int64_t width, int64_t height, int64_t bits,
                             uint8_t *down);

enum { MOST_SIDE = 90, MOST_BYTES = 4 * MOST_SIDE * MOST_SIDE, CASES = 400, SUMS = 3000000 };

static uint64_t state;
static const int32_t stop = 0;

static uint64_t draw(void) {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static int64_t below(int64_t limit) { return (int64_t)(draw() >> 16) % limit; }
static double between(double low, double high) { return low + (high - low) * (double)below(1 << 30) / (1 << 30); }

static uint64_t hash_of(uint64_t hash, const uint8_t *bytes, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

/* Half of the images are noise, the others have few levels. */
static struct image draw_image(uint8_t *pixels) {
    int64_t channels = below(2) ? 3 : 1, height = 1 + below(MOST_SIDE), width = 1 + below(MOST_SIDE);
    uint8_t mask = below(2) ? 0xff : 0x81;
    for (int64_t i = 0; i < height * width * channels; i++)
        pixels[i] = (uint8_t)draw() & mask;
    return (struct image){pixels, height, width, channels, width * channels};
}

static void resampled(const struct image *image, uint8_t *out) {
    int64_t grid[2] = {1 + below(MOST_SIDE), 1 + below(MOST_SIDE)};
    struct resampling geometry = {{0, 0, image->height, image->width}, {0, 0}, {grid[0], grid[1]},
                                  {0, 0, grid[0], grid[1]}, {below(9) - 4, below(9) - 4, 1 + below(50), 1 + below(50)},
                                  {below(2), below(2)}};
    struct filter filter = {below(3), below(2), {9, 200, 50}};
    const int64_t *window = geometry.window;
    struct image result = {out, window[2], window[3], image->channels, window[3] * image->channels};
    resample(image, &geometry, &filter, &result, &stop);
}

static void warped(const struct image *image, uint8_t *out) {
    double matrix[9] = {between(-2, 2), between(-2, 2), between(-40, 90), between(-2, 2), between(-2, 2),
                        between(-40, 90), 0, 0, 1};
    int64_t part[4] = {below(5), below(5), 1 + below(MOST_SIDE), 1 + below(MOST_SIDE)};
    if (below(2))
        matrix[6] = between(-0.01, 0.01), matrix[7] = between(-0.01, 0.01);
    struct view view = {below(2), below(4), 0, {9, 200, 50}};
    view.as_torchvision = matrix[6] == 0 && below(2);
    struct image result = {out, part[2], part[3], image->channels, part[3] * image->channels};
    warp_image(&(struct warp){image, &result, matrix, part[0], part[1], &view}, &stop);
}

/* Sets weights that are symmetric, some of them tiny. */
static int64_t draw_weights(double *weights) {
    int64_t middle = below(12);
    for (int64_t i = 0; i <= middle; i++)
        weights[i] = weights[2 * middle - i] = below(8) ? between(0, 1.0 / (double)(middle + 1)) : ldexp(1.1, -140);
    return 2 * middle + 1;
}

static void filtered(const struct image *image, uint8_t *out) {
    double rows[23], columns[23];
    int64_t high = draw_weights(rows), wide = draw_weights(columns);
    struct local_filter filter = {rows, columns, high, wide, below(2) ? 0 : between(-1, 1),
                                  below(2) ? 0 : between(0, 3), below(2)};
    struct image result = *image;
    result.pixels = out;
    filter_image(image, &filter, &result, &stop);
}

static void colored(const struct image *image, uint8_t *out) {
    int64_t codes[4];
    uint8_t tables[3 * 256];
    double factors[4], values[12];
    for (int i = 0; i < 3 * 256; i++)
        tables[i] = (uint8_t)draw();
    for (int i = 0; i < 12; i++)
        values[i] = i % 4 == 3 ? between(-50, 50) : between(-1, 1);
    for (int i = 0; i < 4; i++) {
        codes[i] = (int64_t[]){0, 1, 2, 3, 4, 5, 6, 8, 9, -1}[below(10)]; /* see `enum operation` */
        factors[i] = codes[i] == 5 || codes[i] == 6 ? 0 : codes[i] == 3 ? between(-0.5, 0.5) : between(0, 2);
    }
    const struct operations operations = {codes, factors, 4, tables, values};
    struct image changed = *image;
    changed.pixels = out;
    memcpy(out, image->pixels, (size_t)(image->height * image->pitch));
    run_operations(&changed, &operations, 0, &stop);
}

static void outlined(const struct image *image, uint8_t *out) {
    double outline[20];
    for (int i = 0; i < 20; i++)
        outline[i] = between(-20, MOST_SIDE + 20);
    gpuflow_draw_outline(outline, 3 + below(8), image->width, image->height, 1, out);
}

static void print(const char *name, void (*make)(const struct image *, uint8_t *)) {
    static uint8_t pixels[MOST_BYTES], out[MOST_BYTES];
    uint64_t hash = 0xcbf29ce484222325u;
    state = 88172645463325252u;
    for (int i = 0; i < CASES; i++) {
        struct image image = draw_image(pixels);
        memset(out, 0, sizeof out);
        make(&image, out);
        hash = hash_of(hash, out, sizeof out);
    }
    printf("%s %016llx\n", name, (unsigned long long)hash);
}

/* Counts sums that fmaf rounds otherwise. Most lie near the middle of two floats, a sixth of them are subnormal. */
static int64_t wrong_sums(void) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < SUMS; i++) {
        int exponent = below(6) ? (int)below(60) - 30 : -130;
        float z = ldexpf((float)between(-2, 2), exponent), x = ldexpf((float)(1 + below(1 << (1 + below(24)))), -12);
        double middle = ldexp((double)below(8) + 0.5, exponent - 23);
        volatile float y = (float)(middle / (double)x) * (below(3) ? 1.0f : 1.0f + 0x1p-23f);
        if (below(4) == 0) /* a tiny number decides on a product halfway between two floats */
            x = (float)(below(1 << 12) | 0x801), y = (float)(below(1 << 13) | 0x1001), z = ldexpf(z, -40);
        float sum = multiply_add(x, y, z), expected = fmaf(x, y, z);
        wrong += memcmp(&sum, &expected, sizeof sum) != 0;
    }
    return wrong;
}

int main(void) {
    print("resample", resampled);
    print("warp", warped);
    print("filter", filtered);
    print("color", colored);
    print("outline", outlined);
    printf("wrong sums %lld\n", (long long)wrong_sums());
    return 0;
}
