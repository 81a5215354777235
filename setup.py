"""The compiled libraries, if there is a compiler; pyproject.toml says everything else.

They have no Python in them (ctypes loads them), so they depend on no version of Python or torch.
Without a compiler the installation goes on: the torch paths are used (docs/kernels.md), and gloo
between ranks of a host (docs/notes/shared_memory.md).
"""

import sys

from setuptools import Extension, setup

# No fused multiply-add, no reassociation: the bits must be those of the torch paths.
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno"]

KERNELS = Extension(
    "rowmesh.native._kernels",
    [f"src/rowmesh/native/{name}.c" for name in ("kernels", "dots", "codecs")],
    depends=["src/rowmesh/native/target.h"],
    extra_compile_args=FLAGS,
    libraries=["m"],
    optional=True,
)
SEGMENT = Extension(  # futexes: Linux only
    "rowmesh.native._segment",
    ["src/rowmesh/native/segment.c"],
    extra_compile_args=["-std=gnu11", "-O2"],
    libraries=["pthread"],
    optional=True,
)
BUILT = {"win32": [], "linux": [KERNELS, SEGMENT]}

setup(ext_modules=BUILT.get(sys.platform, [KERNELS]))
