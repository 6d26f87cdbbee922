"""What the binding uses of nvJPEG's own header, as it stands there.

Source: `include/nvjpeg.h` of version 13.3.2 (NVJPEG_VER_*), in the wheel nvidia-nvjpeg 13.3.2.43 of PyPI.
"""

from __future__ import annotations

FUNCTIONS = {
    "nvjpegCreateEx": (
        "nvjpegBackend_t backend",
        "nvjpegDevAllocator_t *dev_allocator",
        "nvjpegPinnedAllocator_t *pinned_allocator",
        "unsigned int flags",
        "nvjpegHandle_t *handle",
    ),
    "nvjpegJpegStateCreate": ("nvjpegHandle_t handle", "nvjpegJpegState_t *jpeg_handle"),
    "nvjpegDecodeBatchedInitialize": (
        "nvjpegHandle_t handle",
        "nvjpegJpegState_t jpeg_handle",
        "int batch_size",
        "int max_cpu_threads",
        "nvjpegOutputFormat_t output_format",
    ),
    "nvjpegDecodeBatched": (
        "nvjpegHandle_t handle",
        "nvjpegJpegState_t jpeg_handle",
        "const unsigned char *const *data",
        "const size_t *lengths",
        "nvjpegImage_t *destinations",
        "cudaStream_t stream",
    ),
    "nvjpegDecodeParamsCreate": ("nvjpegHandle_t handle", "nvjpegDecodeParams_t *decode_params"),
    "nvjpegDecodeParamsSetOutputFormat": (
        "nvjpegDecodeParams_t decode_params",
        "nvjpegOutputFormat_t output_format",
    ),
    "nvjpegDecodeParamsSetROI": (
        "nvjpegDecodeParams_t decode_params",
        "int offset_x",
        "int offset_y",
        "int roi_width",
        "int roi_height",
    ),
    "nvjpegDecodeBatchedEx": (
        "nvjpegHandle_t handle",
        "nvjpegJpegState_t jpeg_handle",
        "const unsigned char *const *data",
        "const size_t *lengths",
        "nvjpegImage_t *destinations",
        "nvjpegDecodeParams_t *decode_params",
        "cudaStream_t stream",
    ),
    "nvjpegDecodeParamsDestroy": ("nvjpegDecodeParams_t decode_params",),
    "nvjpegJpegStateDestroy": ("nvjpegJpegState_t jpeg_handle",),
    "nvjpegDestroy": ("nvjpegHandle_t handle",),
    "nvjpegGetProperty": ("libraryPropertyType type", "int *value"),
}
"""Each returns an nvjpegStatus_t."""

POINTERS = {"nvjpegHandle_t", "nvjpegJpegState_t", "nvjpegDecodeParams_t", "cudaStream_t"}
"""Names of types that are pointers to a struct."""
ENUMS = {"nvjpegBackend_t", "nvjpegOutputFormat_t", "libraryPropertyType"}

NVJPEG_BACKEND = {"HYBRID": 1, "GPU_HYBRID": 2, "HARDWARE": 3}
NVJPEG_OUTPUT = {"Y": 2, "RGBI": 5, "BGRI": 6}
NVJPEG_FLAGS = {"HW_DECODE_NO_PIPELINE": 1, "UPSAMPLING_WITH_INTERPOLATION": 1 << 5}
NVJPEG_STATUS = {
    "SUCCESS": 0,
    "NOT_INITIALIZED": 1,
    "INVALID_PARAMETER": 2,
    "BAD_JPEG": 3,
    "JPEG_NOT_SUPPORTED": 4,
    "ALLOCATOR_FAILURE": 5,
    "EXECUTION_FAILED": 6,
    "ARCH_MISMATCH": 7,
    "INTERNAL_ERROR": 8,
    "IMPLEMENTATION_NOT_SUPPORTED": 9,
    "INCOMPLETE_BITSTREAM": 10,
}
NVJPEG_IMAGE = ("unsigned char *channel[4]", "size_t pitch[4]")
"""The fields of nvjpegImage_t."""
