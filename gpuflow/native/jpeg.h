/* Decodes JPEGs for the C files of this folder; jpeg.c says how. */

#include <stdint.h>

enum jpeg_color { JPEG_RGB, JPEG_BGR, JPEG_GRAY };

/* JPEG_REFUSED: libjpeg-turbo gave an error or a warning, or none is open; OpenCV then decides whether the file is bad.
 * JPEG_STOPPED: `stop` was set. */
enum jpeg_status { JPEG_DONE, JPEG_REFUSED, JPEG_NO_MEMORY, JPEG_STOPPED };

/* height, width: of the whole image; a file of another size is refused before anything is written. region: y, x,
 * height, width. out: receives `region` exactly, `pitch` bytes a row; undefined unless the result is JPEG_DONE.
 * stop: read every 64 rows; may be NULL. Any number of threads may call this. */
__attribute__((visibility("hidden"))) int decode_jpeg(const uint8_t *data, int64_t bytes, int color, int64_t height,
                                                      int64_t width, const int64_t *region, uint8_t *out,
                                                      int64_t pitch, const int32_t *stop);
