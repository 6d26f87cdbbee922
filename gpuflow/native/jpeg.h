/* Decodes JPEGs for the C files of this folder; jpeg.c says how. */

#include <stdint.h>

enum jpeg_color { JPEG_RGB, JPEG_BGR, JPEG_GRAY };

/* Returns DONE, NO_MEMORY, STOPPED or REFUSED: see image.h. height, width: of the whole image; a file of another size
 * is refused before anything is written. region: y, x, height, width. out: receives `region` exactly, `pitch` bytes a
 * row; undefined unless the result is DONE. stop: read every few rows, or NULL. Any number of threads may call it. */
int gpuflow_decode_jpeg(const uint8_t *data, int64_t bytes, int color, int64_t height, int64_t width,
                        const int64_t *region, uint8_t *out, int64_t pitch, const int32_t *stop);
