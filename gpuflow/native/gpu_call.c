/* Queues a call of nvJPEG, with the transfer before it and the kernels after it. See gpu_call.py, which has the same
 * structs.
 *
 * Nothing here is linked against CUDA: the functions come as addresses, those of the CUDA driver's API (cuda.h) and of
 * nvJPEG (nvjpeg.h). Sources of both: the headers of CUDA 13.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MOST_PARAMETERS = 64 };
enum step { INITIALIZE = 1, DECODE, RECORD, WAIT, TRANSFER, LAUNCH, WAIT_IN_STREAM, SET_REGION, DECODE_REGIONS };

struct functions {
    int (*wait_for_event)(void *event);
    int (*record_event)(void *event, void *stream);
    int (*wait_in_stream)(void *stream, void *event, unsigned flags);
    int (*transfer)(uint64_t to, const void *from, size_t bytes, void *stream);
    int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                  unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **parameters,
                  void **extra);
    int (*initialize)(void *handle, void *state, int images, int threads, int format);
    int (*decode)(void *handle, void *state, const void *data, const void *lengths, const void *images, void *stream);
    int (*set_region)(void *parameters, int x, int y, int width, int height);
    int (*decode_regions)(void *handle, void *state, const void *data, const void *lengths, const void *images,
                          void *const *parameters, void *stream);
};

/* A kernel that gets the same parameters each time, except for the address of its plan. */
struct launch {
    void *function;
    void **parameters;
    int64_t count_of_parameters, parameter_of_plan;
    uint64_t plan;
    int64_t blocks, threads, shared_bytes;
};

/* Each pointer to a part that a call does not have is NULL, and each number of bytes is 0.
 *
 * free: an event after which the memory of this call may be written. source: what is copied to `plans`, pinned memory,
 * and from there to the device. pixels: what is copied to the device directly. handle: of nvJPEG. initialize: whether
 * the state must be set up for this number of images. decoded: an event after the last call that used the state.
 * regions: x, y, width and height of the part of each image that is written; all of it without them. parameters: an
 * nvjpegDecodeParams_t for each image. done: an event to record at the end. */
struct call {
    void *free;
    const void *source;
    void *plans;
    uint64_t plans_on_device;
    int64_t bytes_of_plans;
    const void *pixels;
    uint64_t pixels_on_device;
    int64_t bytes_of_pixels;
    void *handle, *state;
    int64_t images, format, initialize;
    const void *data, *lengths, *destinations;
    const int64_t (*regions)[4];
    void *const *parameters;
    void *decoding_stream, *decoded;
    void *stream, *done;
    const struct launch *launches;
    int64_t count_of_launches;
};

static int64_t failed(enum step step, int status) { return status ? (int64_t)step << 32 | (uint32_t)status : 0; }

static int64_t decode_images(const struct functions *f, const struct call *call) {
    if (!call->regions)
        return failed(DECODE, f->decode(call->handle, call->state, call->data, call->lengths, call->destinations,
                                        call->decoding_stream));
    for (int64_t i = 0; i < call->images; i++) {
        const int64_t *region = call->regions[i];
        int x = (int)region[0], y = (int)region[1], width = (int)region[2], height = (int)region[3];
        int64_t failure = failed(SET_REGION, f->set_region(call->parameters[i], x, y, width, height));
        if (failure)
            return failure;
    }
    return failed(DECODE_REGIONS, f->decode_regions(call->handle, call->state, call->data, call->lengths,
                                                    call->destinations, call->parameters, call->decoding_stream));
}

static int64_t decode(const struct functions *f, const struct call *call) {
    int64_t failure;
    if (call->initialize) {
        if ((failure = failed(WAIT, f->wait_for_event(call->decoded))))
            return failure;
        failure = failed(INITIALIZE, f->initialize(call->handle, call->state, (int)call->images, 1, (int)call->format));
        if (failure)
            return failure;
    }
    failure = decode_images(f, call);
    int64_t of_event = failed(RECORD, f->record_event(call->decoded, call->decoding_stream));
    if (failure || of_event)
        return failure ? failure : of_event;
    if (call->decoding_stream != call->stream)
        return failed(WAIT_IN_STREAM, f->wait_in_stream(call->stream, call->decoded, 0));
    return 0;
}

static int64_t launch(const struct functions *f, const struct launch *one, void *stream) {
    void *parameters[MOST_PARAMETERS];
    uint64_t plan = one->plan;
    for (int64_t i = 0; i < one->count_of_parameters; i++)
        parameters[i] = one->parameters[i];
    parameters[one->parameter_of_plan] = &plan;
    return failed(LAUNCH, f->launch(one->function, (unsigned)one->blocks, 1, 1, (unsigned)one->threads, 1, 1,
                                    (unsigned)one->shared_bytes, stream, parameters, NULL));
}

/* Returns 0, or the step that failed, times 2^32, plus its status. */
int64_t gpuflow_queue(const struct functions *f, const struct call *call) {
    int64_t failure = call->free ? failed(WAIT, f->wait_for_event(call->free)) : 0;
    if (!failure && call->bytes_of_plans) {
        memcpy(call->plans, call->source, (size_t)call->bytes_of_plans);
        failure = failed(TRANSFER, f->transfer(call->plans_on_device, call->plans, (size_t)call->bytes_of_plans,
                                               call->stream));
    }
    if (!failure && call->bytes_of_pixels)
        failure = failed(TRANSFER, f->transfer(call->pixels_on_device, call->pixels, (size_t)call->bytes_of_pixels,
                                               call->stream));
    if (!failure && call->handle)
        failure = decode(f, call);
    for (int64_t i = 0; !failure && i < call->count_of_launches; i++)
        failure = launch(f, &call->launches[i], call->stream);
    if (!failure && call->done)
        failure = failed(RECORD, f->record_event(call->done, call->stream));
    return failure;
}
