/* Colour operations on levels, each equal to torchvision v2's on uint8 tensors, to the bit; `Operation` in
 * pipeline/pointwise.py names them. color_avx2.c compiles this file once more, for processors with AVX2 and FMA.
 *
 * Operations that map each channel's levels are joined in one table a channel, which is looked up with the next
 * operation that needs all channels of a pixel, or at the end. */

#include <stdlib.h>
#include <string.h>

#include "color.h"
#include "variant.h"

enum { LEVELS = 256, MOST_CHANNELS = 3, BLOCK = 512, TOGETHER = 32 };
/* BLOCK: pixels that are processed at a time. TOGETHER: loops process a multiple of this number. */

enum operation { BRIGHTNESS, CONTRAST, SATURATION, HUE, GRAYSCALE, TABLE, MATRIX, ERASE, AUTOCONTRAST, EQUALIZE };

/* The functions of this file, compiled for one kind of processor. */
struct color_functions {
    void (*run)(struct image *, const struct operations *, int64_t, const int32_t *);
    void (*look_up)(const struct image *, const void *, int64_t, int, void *);
};

/* What is to be looked up in each channel of an image before anything else reads it. */
struct pending {
    int changed;
    uint8_t tables[MOST_CHANNELS][LEVELS];
};

typedef uint8_t planes[MOST_CHANNELS][BLOCK];

/* --- arithmetic ----------------------------------------------------------------------------------------------------- */

/* Clamped and rounded down. Floats from 0 on are ordered as their bits are, and processors have one instruction for the
 * smaller of two integers, but several for that of two floats that may be NaN. */
static inline uint8_t to_level(float value) {
    const int32_t most = 0x437F0000; /* the bits of 255.0f */
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = bits > 0 ? bits : 0;
    bits = bits < most ? bits : most;
    memcpy(&value, &bits, sizeof value);
    return (uint8_t)(int)value;
}

/* A number whose products with levels are finite. Those of infinity and 0 are NaN, whose sign differs between processors,
 * and the level with it. */
static double bounded(double number) {
    const double most = 1e30;
    return number > -most ? (number < most ? number : most) : -most;
}

/* floorf of numbers from 0 on, which every processor can do on several at a time. */
static inline float round_down(float value) { return (float)(int)value; }

/* PyTorch adds a product in one rounding. Without an instruction for that, doubles hold the exact product of a level and
 * a float. */
static inline float add_product(float x, float y, float total) {
#if defined(FUSED) || defined(__FMA__) || defined(__FP_FAST_FMAF)
    return __builtin_fmaf(x, y, total);
#else
    return (float)((double)x * (double)y + (double)total);
#endif
}

/* Rec. 601 luma, rounded down. */
static inline float luma(float red, float green, float blue) {
    return round_down(add_product(blue, 0.114f, add_product(green, 0.587f, red * 0.2989f)));
}

/* One of two levels. A compiler makes branches of long conditional expressions, and then does not process several pixels
 * at a time. */
static inline uint8_t pick(int condition, uint8_t yes, uint8_t no) {
    const uint8_t mask = (uint8_t)-condition;
    return (uint8_t)((yes & mask) | (no & ~mask));
}

/* --- looking levels up ---------------------------------------------------------------------------------------------- */

enum { UNROLLED = 8 };

/* Looks up items of item_bytes, a constant: of every from_step-th level, for every to_step-th item. */
INLINE void look_up_line(const uint8_t *from, int64_t from_step, int64_t count, const uint8_t *restrict table,
                         uint8_t *to, int64_t to_step, int64_t item_bytes) {
    int64_t i = 0;
    for (; i + UNROLLED <= count; i += UNROLLED)
        for (int64_t next = i; next < i + UNROLLED; next++)
            memcpy(to + next * to_step * item_bytes, table + from[next * from_step] * item_bytes, (size_t)item_bytes);
    for (; i < count; i++)
        memcpy(to + i * to_step * item_bytes, table + from[i * from_step] * item_bytes, (size_t)item_bytes);
}

INLINE void look_up_image(const struct image *image, const uint8_t *table, int64_t item_bytes, int planes,
                          uint8_t *out) {
    const int64_t width = image->width, size = image->height * width, channels = image->channels;
    for (int64_t row = 0; row < image->height; row++)
        for (int64_t channel = 0; channel < channels; channel++) {
            const uint8_t *from = image->pixels + row * image->pitch + channel;
            const uint8_t *levels = table + channel * LEVELS * item_bytes;
            if (channels == 1)
                look_up_line(from, 1, width, levels, out + row * width * item_bytes, 1, item_bytes);
            else if (planes)
                look_up_line(from, 3, width, levels, out + (channel * size + row * width) * item_bytes, 1, item_bytes);
            else
                look_up_line(from, 3, width, levels, out + (row * width * 3 + channel) * item_bytes, 3, item_bytes);
        }
}

/* --- blocks of pixels ----------------------------------------------------------------------------------------------- */

/* Goes through an image. */
struct position {
    const struct image *image;
    int64_t width, height, row, column;
    const int32_t *stop;
};

static struct position start_of(const struct image *image, const int32_t *stop) {
    if (image->pitch == image->width * image->channels)
        return (struct position){image, image->width * image->height, 1, 0, 0, stop};
    return (struct position){image, image->width, image->height, 0, 0, stop};
}

/* The number of pixels in the next block, and its first one. 0 at the end, and once the work is to stop. */
static int64_t next_block(struct position *position, uint8_t **pixels) {
    if (position->column == position->width)
        position->column = 0, position->row++;
    if (position->row >= position->height || is_stopped(position->stop))
        return 0;
    const struct image *image = position->image;
    int64_t count = at_most(position->width - position->column, BLOCK);
    *pixels = pixel_at(image, position->row, position->column);
    position->column += count;
    return count;
}

static void load(const uint8_t *restrict pixels, int64_t count, const struct pending *pending, planes to) {
    if (pending->changed) {
        for (int channel = 0; channel < 3; channel++)
            look_up_line(pixels + channel, 3, count, pending->tables[channel], to[channel], 1, 1);
        return;
    }
    uint8_t *restrict reds = to[0], *restrict greens = to[1], *restrict blues = to[2];
    for (int64_t i = 0; i < count; i++) {
        reds[i] = pixels[3 * i];
        greens[i] = pixels[3 * i + 1];
        blues[i] = pixels[3 * i + 2];
    }
}

static void store(planes from, int64_t count, uint8_t *restrict pixels) {
    const uint8_t *restrict reds = from[0], *restrict greens = from[1], *restrict blues = from[2];
    for (int64_t i = 0; i < count; i++) {
        pixels[3 * i] = reds[i];
        pixels[3 * i + 1] = greens[i];
        pixels[3 * i + 2] = blues[i];
    }
}

/* --- tables --------------------------------------------------------------------------------------------------------- */

static void clear(struct pending *pending) {
    pending->changed = 0;
    for (int i = 0; i < LEVELS; i++)
        for (int channel = 0; channel < MOST_CHANNELS; channel++)
            pending->tables[channel][i] = (uint8_t)i;
}

/* Adds a table to those that are to be looked up in a channel. */
static void append(struct pending *pending, int64_t channel, const uint8_t *table) {
    pending->changed = 1;
    for (int i = 0; i < LEVELS; i++)
        pending->tables[channel][i] = table[pending->tables[channel][i]];
}

/* Changes the pixels by what is to be looked up. */
static void look_up_pending(struct image *image, struct pending *pending, const int32_t *stop) {
    if (!pending->changed)
        return;
    uint8_t *pixels;
    struct position position = start_of(image, stop);
    for (int64_t count; (count = next_block(&position, &pixels));) {
        if (image->channels == 1)
            look_up_line(pixels, 1, count, pending->tables[0], pixels, 1, 1);
        else
            for (int channel = 0; channel < 3; channel++)
                look_up_line(pixels + channel, 3, count, pending->tables[channel], pixels + channel, 3, 1);
    }
    clear(pending);
}

/* How many pixels have each level in each channel, once the tables are looked up. */
static void count_levels(const struct image *image, const struct pending *pending, const int32_t *stop,
                         int64_t counts[MOST_CHANNELS][LEVELS]) {
    int64_t before[MOST_CHANNELS][LEVELS] = {{0}};
    uint8_t *pixels;
    struct position position = start_of(image, stop);
    for (int64_t count; (count = next_block(&position, &pixels));) {
        if (image->channels == 1)
            for (int64_t i = 0; i < count; i++)
                before[0][pixels[i]]++;
        else
            for (int64_t i = 0; i < count; i++)
                for (int channel = 0; channel < MOST_CHANNELS; channel++)
                    before[channel][pixels[MOST_CHANNELS * i + channel]]++;
    }
    memset(counts, 0, sizeof before);
    for (int channel = 0; channel < image->channels; channel++)
        for (int i = 0; i < LEVELS; i++)
            counts[channel][pending->tables[channel][i]] += before[channel][i];
}

static int64_t luma_of_block(planes levels, int64_t count) {
    const uint8_t *reds = levels[0], *greens = levels[1], *blues = levels[2];
    int32_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (int32_t)luma(reds[i], greens[i], blues[i]);
    return sum;
}

/* The mean luma of an image, or the mean level of a gray one. The sum is exact. torch's sum of floats rounds above 65,793
 * pixels, in a way that depends on the processor and on the number of threads. */
static float mean_luma(const struct image *image, const struct pending *pending, const int32_t *stop) {
    int64_t sum = 0;
    planes levels;
    uint8_t *pixels;
    struct position position = start_of(image, stop);
    for (int64_t count; (count = next_block(&position, &pixels));) {
        if (image->channels == 1) {
            for (int64_t i = 0; i < count; i++)
                sum += pending->tables[0][pixels[i]];
        } else {
            load(pixels, count, pending, levels);
            sum += luma_of_block(levels, count);
        }
    }
    return (float)sum / (float)(image->height * image->width);
}

/* Blends the image with one level. */
static void blend(struct pending *pending, double factor, float other) {
    uint8_t table[LEVELS];
    double rest = (double)(float)(1.0 - factor) * (double)other;
    for (int i = 0; i < LEVELS; i++)
        table[i] = to_level((float)((double)((float)i * (float)factor) + rest));
    for (int64_t channel = 0; channel < MOST_CHANNELS; channel++)
        append(pending, channel, table);
}

/* Stretches a channel to 0-255. */
static void stretch(struct pending *pending, int64_t channel, const int64_t *counts) {
    int low = 0, high = LEVELS - 1;
    while (low < high && !counts[low])
        low++;
    while (low < high && !counts[high])
        high--;
    if (low == high)
        return;
    uint8_t table[LEVELS];
    float scale = (float)(high - low) * (float)(1.0 / 255);
    for (int i = 0; i < LEVELS; i++)
        table[i] = to_level((float)(i - low) / scale);
    append(pending, channel, table);
}

static void equalize(struct pending *pending, int64_t channel, const int64_t *counts, int64_t pixels) {
    int highest = LEVELS - 1;
    while (highest && !counts[highest])
        highest--;
    int64_t step = (pixels - counts[highest]) / 255, below = 0;
    if (step == 0)
        return;
    uint8_t table[LEVELS];
    for (int i = 0; i < LEVELS; i++) {
        int64_t level = (below + step / 2) / step;
        table[i] = (uint8_t)(level < 255 ? level : 255);
        below += counts[i];
    }
    append(pending, channel, table);
}

/* --- operations that need all channels of a pixel ------------------------------------------------------------------- */

/* Numbers of an operation: a factor and what remains of 1, or a matrix. */
typedef const float *numbers;

static void saturate(planes levels, int64_t count, numbers by) {
    uint8_t *restrict reds = levels[0], *restrict greens = levels[1], *restrict blues = levels[2];
    const float factor = by[0], rest = by[1];
    for (int64_t i = 0; i < count; i++) {
        float red = reds[i], green = greens[i], blue = blues[i], gray = luma(red, green, blue);
        reds[i] = to_level(add_product(gray, rest, red * factor));
        greens[i] = to_level(add_product(gray, rest, green * factor));
        blues[i] = to_level(add_product(gray, rest, blue * factor));
    }
}

static void make_gray(planes levels, int64_t count, numbers by) {
    (void)by;
    uint8_t *restrict reds = levels[0], *restrict greens = levels[1], *restrict blues = levels[2];
    for (int64_t i = 0; i < count; i++)
        reds[i] = greens[i] = blues[i] = (uint8_t)(int)luma(reds[i], greens[i], blues[i]);
}

static inline uint8_t weighted(float red, float green, float blue, numbers row) {
    return to_level(add_product(blue, row[2], add_product(green, row[1], red * row[0])) + row[3]);
}

static void multiply(planes levels, int64_t count, numbers by) {
    uint8_t *restrict reds = levels[0], *restrict greens = levels[1], *restrict blues = levels[2];
    float rows[12];
    memcpy(rows, by, sizeof rows);
    for (int64_t i = 0; i < count; i++) {
        float red = reds[i], green = greens[i], blue = blues[i];
        reds[i] = weighted(red, green, blue, rows);
        greens[i] = weighted(red, green, blue, rows + 4);
        blues[i] = weighted(red, green, blue, rows + 8);
    }
}

/* As torchvision does, but what is chosen is chosen as levels, of which an instruction processes most. */
static void shift_hue(planes levels, int64_t count, numbers by) {
    uint8_t *restrict reds = levels[0], *restrict greens = levels[1], *restrict blues = levels[2];
    const float shift = by[0], unit = 1.0f / 255, top = (float)(255 + 1 - 1e-3);
    for (int64_t i = 0; i < count; i++) {
        const uint8_t red = reds[i], green = greens[i], blue = blues[i];
        uint8_t highest = red > green ? red : green, lowest = red < green ? red : green;
        highest = blue > highest ? blue : highest;
        lowest = blue < lowest ? blue : lowest;
        const int is_red = red == highest, is_green = green == highest;
        const uint8_t next = pick(is_red, blue, pick(is_green, red, green));
        const uint8_t last = pick(is_red, green, pick(is_green, blue, red));
        const float start = pick(is_red, 0, pick(is_green, 2, 4)), is_gray = highest == lowest;

        const float high = (float)highest * unit, spread = high - (float)lowest * unit;
        const float saturation = spread / (high + is_gray), divisor = spread + is_gray;
        const float after = (high - (float)next * unit) / divisor, before = (high - (float)last * unit) / divisor;
        float hue = ((after + start) - before) * (float)(1.0 / 6) + 1.0f;
        hue = (hue - round_down(hue)) + shift;
        hue -= hue >= 1.0f ? 1.0f : 0.0f;
        hue += hue < 0.0f ? 1.0f : 0.0f;
        const float sixths = hue * 6.0f;
        const int sixth = (int)sixths;
        const float part = saturation * (sixths - (float)sixth), rest = 1.0f - saturation;

        const uint8_t sector = (uint8_t)sixth, most = (uint8_t)(int)(high * top);
        const uint8_t falling = (uint8_t)(int)((1.0f - part) * high * top);
        const uint8_t rising = (uint8_t)(int)((part + rest) * high * top);
        const uint8_t least = (uint8_t)(int)(rest * high * top);
        reds[i] = pick(sector == 1, falling, pick(sector == 4, rising, pick((sector == 2) | (sector == 3), least, most)));
        greens[i] = pick((sector == 0) | (sector == 6), rising,
                         pick((sector == 1) | (sector == 2), most, pick(sector == 3, falling, least)));
        blues[i] = pick(sector == 2, rising,
                        pick((sector == 3) | (sector == 4), most, pick(sector == 5, falling, least)));
    }
}

/* Changes an image of 3 channels by one of these functions. */
static void change_pixels(struct image *image, struct pending *pending, const int32_t *stop,
                          void (*change)(planes, int64_t, numbers), numbers by) {
    planes levels = {{0}};
    uint8_t *pixels;
    struct position position = start_of(image, stop);
    for (int64_t count; (count = next_block(&position, &pixels));) {
        load(pixels, count, pending, levels);
        change(levels, (count + TOGETHER - 1) / TOGETHER * TOGETHER, by);
        store(levels, count, pixels);
    }
    clear(pending);
}

/* A gray image has equal red, green and blue, and gets the first row's result. */
static void multiply_gray(struct pending *pending, numbers row) {
    uint8_t table[LEVELS];
    for (int i = 0; i < LEVELS; i++)
        table[i] = weighted((float)i, (float)i, (float)i, row);
    append(pending, 0, table);
}

static void change_by_matrix(struct image *image, struct pending *pending, const int32_t *stop, const double *values) {
    float rows[12];
    for (int i = 0; i < 12; i++)
        rows[i] = (float)(bounded(values[i]) + (i % 4 == 3 ? 0.5 : 0.0)); /* a half, as levels are rounded down */
    if (image->channels == 1)
        multiply_gray(pending, rows);
    else
        change_pixels(image, pending, stop, multiply, rows);
}

/* Fills the part of a box that lies within the image. values: its y, x, height and width, and a colour. */
static void erase(struct image *image, const double *values) {
    int64_t top = (int64_t)values[0], left = (int64_t)values[1];
    int64_t bottom = at_most(top + (int64_t)values[2], image->height);
    int64_t right = at_most(left + (int64_t)values[3], image->width);
    for (int64_t y = at_least(top, 0); y < bottom; y++)
        for (int64_t x = at_least(left, 0); x < right; x++)
            for (int64_t channel = 0; channel < image->channels; channel++)
                pixel_at(image, y, x)[channel] = (uint8_t)values[4 + channel];
}

/* --- the entries ---------------------------------------------------------------------------------------------------- */

static void change_by_levels(const struct image *image, struct pending *pending, const int32_t *stop,
                             enum operation operation) {
    int64_t counts[MOST_CHANNELS][LEVELS];
    count_levels(image, pending, stop, counts);
    for (int64_t channel = 0; channel < image->channels; channel++) {
        if (operation == AUTOCONTRAST)
            stretch(pending, channel, counts[channel]);
        else
            equalize(pending, channel, counts[channel], image->height * image->width);
    }
}

static void operate(struct image *image, struct pending *pending, const int32_t *stop, enum operation operation,
                    double factor, const struct operations *operations) {
    static void (*const changes[])(planes, int64_t, numbers) = {
        [SATURATION] = saturate, [HUE] = shift_hue, [GRAYSCALE] = make_gray};
    const float numbers[] = {(float)factor, (float)(1.0 - factor)};
    switch (operation) {
    case BRIGHTNESS:
        blend(pending, factor, 0);
        break;
    case CONTRAST:
        blend(pending, factor, mean_luma(image, pending, stop));
        break;
    case SATURATION:
    case HUE:
    case GRAYSCALE: /* gray images stay as they are */
        if (image->channels == MOST_CHANNELS)
            change_pixels(image, pending, stop, changes[operation], numbers);
        break;
    case TABLE:
        for (int64_t channel = 0; channel < image->channels; channel++)
            append(pending, channel, operations->tables + ((int64_t)factor * MOST_CHANNELS + channel) * LEVELS);
        break;
    case MATRIX:
        change_by_matrix(image, pending, stop, operations->values + (int64_t)factor * 12);
        break;
    case ERASE:
        look_up_pending(image, pending, stop);
        erase(image, operations->values + (int64_t)factor * 12);
        break;
    case AUTOCONTRAST:
    case EQUALIZE:
        change_by_levels(image, pending, stop, operation);
        break;
    }
}

static void run(struct image *image, const struct operations *operations, int64_t sample, const int32_t *stop) {
    struct pending pending;
    clear(&pending);
    for (int64_t i = sample * operations->count; i < (sample + 1) * operations->count; i++)
        if (operations->codes[i] >= 0)
            operate(image, &pending, stop, (enum operation)operations->codes[i], bounded(operations->factors[i]),
                    operations);
    look_up_pending(image, &pending, stop);
}

static void look_up(const struct image *image, const void *table, int64_t item_bytes, int planes, void *out) {
    if (item_bytes == 1)
        look_up_image(image, table, 1, planes, out);
    else if (item_bytes == 2)
        look_up_image(image, table, 2, planes, out);
    else if (item_bytes == 4)
        look_up_image(image, table, 4, planes, out);
    else
        look_up_image(image, table, 8, planes, out);
}

extern const struct color_functions VARIANT(color);
const struct color_functions VARIANT(color) = {run, look_up};

#ifndef FUSED
extern const struct color_functions color_avx2;

void run_operations(struct image *image, const struct operations *operations, int64_t sample, const int32_t *stop) {
    FASTEST(color)->run(image, operations, sample, stop);
}

void look_up_levels(const struct image *image, const void *table, int64_t item_bytes, int planes, void *out) {
    FASTEST(color)->look_up(image, table, item_bytes, planes, out);
}
#endif
