"""The compiled kernels, if there is a compiler; pyproject.toml says everything else.

The library has no Python in it (ctypes loads it), so it depends on no version of Python or torch.
Without a compiler the installation goes on, and the torch paths are used (docs/kernels.md).
"""

import sys

from setuptools import Extension, setup

# No fused multiply-add, no reassociation: the bits must be those of the torch paths.
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno"]

setup(
    ext_modules=[
        Extension(
            "rowmesh.native._kernels",
            ["src/rowmesh/native/kernels.c"],
            extra_compile_args=FLAGS,
            libraries=["m"],
            optional=True,
        )
    ]
    if sys.platform != "win32"
    else []
)
