"""Builds devicemesh._core (C11) and the gloo bridge devicemesh/_gloo.so (C++17)."""

import os
import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

WARNINGS = ["-Wall", "-Wextra", "-Wshadow"]
# By suffix: the bridge has sources of both languages in one extension.
LANGUAGE_FLAGS = {
    ".c": ["-std=c11", "-Wstrict-prototypes", "-Wmissing-prototypes"],
    ".cc": ["-std=c++17", "-fno-gnu-unique", "-fvisibility-inlines-hidden"],
}
STRICT = ["-Werror"] if os.environ.get("DEVICEMESH_WERROR") == "1" else []
GLOO_REMEDY = (
    "devicemesh needs gloo's headers and library: 'apt-get install libgloo-dev', or set "
    "DEVICEMESH_GLOO_ROOT to a folder that holds include/gloo and lib/libgloo.so"
)


def sources(*patterns):
    """Source files of the tree, sorted so that builds are reproducible."""
    return sorted(path for pattern in patterns for path in glob(pattern))


def headers():
    """All our headers: a change in one rebuilds what may include it."""
    return sorted(glob("csrc/**/*.h", recursive=True))


def gloo_root():
    """The prefix under which gloo lies, or SystemExit with the remedy."""
    asked = os.environ.get("DEVICEMESH_GLOO_ROOT")
    for root in [asked] if asked else ["/usr", "/usr/local"]:
        if Path(root, "include/gloo/config.h").exists():
            return str(Path(root).resolve())  # goes into the bridge as its run path
    where = f" (not found under DEVICEMESH_GLOO_ROOT={asked})" if asked else ""
    sys.exit(GLOO_REMEDY + where)


class BuildExt(build_ext):
    """Flags for each source by its language. The bridge has no Python in it, so its plain
    name (no ABI tag) is the one that the core opens."""

    def build_extensions(self):
        compile_one = self.compiler._compile

        def compile_with_language(obj, src, ext, cc_args, postargs, pp_opts):
            flags = LANGUAGE_FLAGS[Path(src).suffix]
            compile_one(obj, src, ext, cc_args, [*postargs, *flags], pp_opts)

        self.compiler._compile = compile_with_language
        super().build_extensions()

    def get_ext_filename(self, fullname):
        if fullname.endswith("_gloo"):
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def get_export_symbols(self, ext):
        return [] if ext.name.endswith("_gloo") else super().get_export_symbols(ext)


core = Extension(
    "devicemesh._core",
    sources=sources(
        "csrc/base/*.c",
        "csrc/layout/*.c",
        "csrc/store/*.c",
        "csrc/backend/*.c",
        "csrc/backend/reduce/*.c",
        "csrc/backend/fake/*.c",
        "csrc/backend/shm/*.c",
        "csrc/backend/mail/*.c",
        "csrc/backend/gloo/dm_netif.c",
        "csrc/group/*.c",
        "csrc/python/*.c",
    ),
    include_dirs=["csrc"],
    depends=headers(),
    define_macros=[("_GNU_SOURCE", "1")],
    extra_compile_args=["-O3", "-fvisibility=hidden", "-pthread", *WARNINGS, *STRICT],
    extra_link_args=["-pthread"],
    libraries=["dl"],
)


def gloo_extension():
    files = sources("csrc/backend/gloo/*.cc", "csrc/backend/gloo/*.c")
    if not files:
        return []
    root = gloo_root()
    # The system's own folders are searched anyway; naming them would change their order.
    system = root == "/usr"
    include = [] if system else ["-isystem", str(Path(root, "include"))]
    libraries = [] if system else [str(Path(root, "lib"))]
    return [
        Extension(
            "devicemesh._gloo",
            # The bridge reduces with our kernels and speaks the core's vocabulary: those
            # few C files are compiled into it too, so that it links nothing of ours.
            sources=[
                *files,
                *sources(
                    "csrc/base/*.c",
                    "csrc/backend/dm_op.c",
                    "csrc/backend/reduce/*.c",
                    "csrc/store/dm_store.c",
                ),
            ],
            include_dirs=["csrc"],
            library_dirs=libraries,
            runtime_library_dirs=libraries,
            depends=[*headers(), "csrc/backend/gloo/exports.map"],
            define_macros=[("_GNU_SOURCE", "1")],
            extra_compile_args=[
                "-O3",
                "-fvisibility=hidden",
                "-pthread",
                *include,
                *WARNINGS,
                *STRICT,
            ],
            # One symbol leaves it: torch carries another gloo in the same process.
            extra_link_args=["-pthread", "-Wl,--version-script=csrc/backend/gloo/exports.map"],
            libraries=["gloo"],
            language="c++",
        )
    ]


setup(ext_modules=[core, *gloo_extension()], cmdclass={"build_ext": BuildExt})
