"""A stage of another package whose operator is its own: an affine warp in C++, in CUDA and in Triton."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.spec import Bounds, ImageSpec, Opaque, require_pixels

__all__ = ["OwnWarp", "inverse_matrices", "warp"]

Kernel = Literal["copy", "cuda", "triton"]

# What C++ and CUDA share: one pixel of the result, bilinear, black outside of the image.
PIXEL = r"""
#include <cmath>
#include <cstdint>
WHERE inline void warp_pixel(const uint8_t* in, uint8_t* out, const double* m, int64_t H, int64_t W, int64_t C,
                             int64_t y, int64_t x) {
  const double sx = m[0] * x + m[1] * y + m[2], sy = m[3] * x + m[4] * y + m[5];
  const double left = std::floor(sx), top = std::floor(sy), fx = sx - left, fy = sy - top;
  const int64_t x0 = (int64_t)left, y0 = (int64_t)top;
  int64_t at[4];
  for (int64_t i = 0; i < 4; i++) {
    const int64_t v = y0 + i / 2, u = x0 + i % 2;
    at[i] = v < 0 || u < 0 || v >= H || u >= W ? -1 : (v * W + u) * C;
  }
  for (int64_t c = 0; c < C; c++) {
    double level[4];
    for (int64_t i = 0; i < 4; i++) level[i] = at[i] < 0 ? 0.0 : in[at[i] + c];
    const double upper = level[0] * (1 - fx) + level[1] * fx, lower = level[2] * (1 - fx) + level[3] * fx;
    out[(y * W + x) * C + c] = (uint8_t)(upper * (1 - fy) + lower * fy + 0.5);
  }
}
"""
# The operator's name and its form for the CPU. torch calls the form that the device of the images asks for.
CPP = (
    "#define WHERE\n"
    + PIXEL
    + r"""
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>
at::Tensor warp(const at::Tensor& images, const at::Tensor& matrices) {
  TORCH_CHECK(images.dim() == 4 && images.scalar_type() == at::kByte && images.is_contiguous(), "images: [N, H, W, C]");
  TORCH_CHECK(matrices.scalar_type() == at::kDouble && matrices.numel() == 6 * images.size(0), "matrices: [N, 2, 3]");
  auto out = at::empty_like(images);
  const int64_t N = images.size(0), H = images.size(1), W = images.size(2), C = images.size(3);
  const uint8_t* in = images.const_data_ptr<uint8_t>();
  const double* m = matrices.const_data_ptr<double>();
  uint8_t* to = out.mutable_data_ptr<uint8_t>();
  at::parallel_for(0, N * H, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      for (int64_t x = 0; x < W; x++) {
        const int64_t n = row / H, image = n * H * W * C;
        warp_pixel(in + image, to + image, m + 6 * n, H, W, C, row % H, x);
      }
  });
  return out;
}
TORCH_LIBRARY(own_warp, library) { library.def("warp(Tensor images, Tensor matrices) -> Tensor"); }
TORCH_LIBRARY_IMPL(own_warp, CPU, library) { library.impl("warp", &warp); }
"""
)
CUDA = (
    "#define WHERE __device__\n"
    + PIXEL
    + r"""
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>
__global__ void warp_kernel(const uint8_t* in, uint8_t* out, const double* m, int64_t H, int64_t W, int64_t C) {
  const int64_t pixel = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = blockIdx.y, image = n * H * W * C;
  if (pixel < H * W) warp_pixel(in + image, out + image, m + 6 * n, H, W, C, pixel / W, pixel % W);
}
at::Tensor warp(const at::Tensor& images, const at::Tensor& matrices) {
  TORCH_CHECK(images.dim() == 4 && images.scalar_type() == at::kByte && images.is_contiguous(), "images: [N, H, W, C]");
  TORCH_CHECK(matrices.scalar_type() == at::kDouble && matrices.numel() == 6 * images.size(0), "matrices: [N, 2, 3]");
  auto out = at::empty_like(images);
  const int64_t N = images.size(0), H = images.size(1), W = images.size(2), C = images.size(3);
  if (out.numel() == 0) return out;
  const c10::cuda::CUDAGuard guard(images.device());
  const dim3 blocks((H * W + 255) / 256, N);
  warp_kernel<<<blocks, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      images.const_data_ptr<uint8_t>(), out.mutable_data_ptr<uint8_t>(), matrices.const_data_ptr<double>(), H, W, C);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}
TORCH_LIBRARY_IMPL(own_warp, CUDA, library) { library.impl("warp", &warp); }
"""
)
# Without fused multiplications all three forms give the same bits.
EXACT, EXACT_CUDA = ["-O3", "-ffp-contract=off"], ["-O3", "-fmad=false"]
_building = threading.Lock()


@cache
def _built(form: Literal["cpp", "cuda"]) -> None:
    from torch.utils.cpp_extension import load_inline

    load_inline(  # type: ignore[no-untyped-call]
        name=f"own_warp_{form}",
        cpp_sources=CPP if form == "cpp" else "",
        cuda_sources=CUDA if form == "cuda" else "",
        extra_cflags=EXACT,
        extra_cuda_cflags=EXACT_CUDA,
        is_python_module=False,
        no_implicit_headers=True,  # torch/extension.h alone takes most of the build
    )


def build(kernel: Kernel) -> None:
    """Build and load what a stage with this kernel calls. Later processes load what the first one built."""
    with _building:
        _built("cpp")
        if kernel == "cuda":
            _built("cuda")


def warp(images: torch.Tensor, matrices: torch.Tensor, kernel: Kernel) -> torch.Tensor:
    """Return uint8 images [N, C, H, W], each sampled where its matrix, float64 [N, 2, 3], takes the result's pixels."""
    pixels = images.permute(0, 2, 3, 1).contiguous()
    if kernel == "triton" and images.is_cuda:
        from own_warp_triton import warp as warp_by_triton

        result: torch.Tensor = warp_by_triton(pixels, matrices)
    else:
        build(kernel)
        result = torch.ops.own_warp.warp(pixels, matrices)
    return result.permute(0, 3, 1, 2)


def inverse_matrices(degrees: Any, scale: Any, height: int, width: int) -> NDArray[np.float64]:
    """Return maps [N, 2, 3] of the result's pixels to the image's, turned and scaled [N] about the centre."""
    x, y = (width - 1) / 2, (height - 1) / 2
    cosine, sine = np.cos(np.radians(degrees)) / scale, np.sin(np.radians(degrees)) / scale
    rows = [cosine, -sine, x - cosine * x + sine * y], [sine, cosine, y - sine * x - cosine * y]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


@dataclass(frozen=True, kw_only=True, repr=False)
class OwnWarp(Opaque):
    """Turn and scale each image about its centre by this package's operator.

    Args:
        degrees: the range of the angle, clockwise.
        scale: the range of the size.
        kernel: what runs on a GPU: `triton`, `cuda`, which needs nvcc, or `copy`: the CPU, on copies of the images.
    """

    stage_name: ClassVar[str] = "own_warp"
    where_fields: ClassVar[tuple[str, ...]] = ("kernel",)

    degrees: Annotated[tuple[float, float], Bounds(limit=360, ascending=True)] = (-30.0, 30.0)
    scale: Annotated[tuple[float, float], Bounds(above=0, ascending=True)] = (0.8, 1.2)
    kernel: Kernel = "triton"

    @classmethod
    def examples(cls) -> tuple[OwnWarp, ...]:
        return cls(), cls(kernel="copy", degrees=(15, 15), scale=(0.9, 0.9)), cls(scale=(0.5, 0.7), degrees=(-5, 5))

    def faults(self) -> Iterator[tuple[str, str]]:
        if self.kernel not in get_args(Kernel):
            yield "kernel", f"must be one of {', '.join(get_args(Kernel))}, got {self.kernel!r}"

    @property
    def random(self) -> bool:
        return self.degrees[0] < self.degrees[1] or self.scale[0] < self.scale[1]

    @property
    def on_gpu(self) -> bool:
        return self.kernel != "copy"

    def prepare(self) -> None:
        build(self.kernel if torch.cuda.is_available() else "copy")

    def output(self, spec: ImageSpec) -> ImageSpec:
        require_pixels(self, spec)
        return spec

    def result_size(self, image: torch.Tensor, seed: int) -> tuple[int, int]:
        height, width = image.shape[1:]
        return height, width

    def apply(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        return self.apply_batch(image[None], np.array([seed]))[0]

    def apply_batch(self, images: torch.Tensor, seeds: NDArray[np.int64]) -> torch.Tensor:
        draws = (seeds >> 31) / 2.0**31, (seeds & (2**31 - 1)) / 2.0**31  # in [0, 1), of 62 random bits
        ranges = zip(draws, (self.degrees, self.scale), strict=True)
        degrees, scale = (low + draw * (high - low) for draw, (low, high) in ranges)
        matrices = torch.from_numpy(inverse_matrices(degrees, scale, *images.shape[2:]))
        return warp(images, matrices.to(images.device), self.kernel)
