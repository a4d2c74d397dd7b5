"""Builds the compiled parts, fastcollab._C (operators) and fastcollab._scheduler; pure Python without a compiler."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent.resolve()
CXX_FLAGS = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-ffp-contract=off"]
CXX_FLAGS += ["-fno-math-errno", "-fno-trapping-math"]  # no bit changes; a loop of exp32 is vectorised with both only
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]  # 2.11: newer shim symbols must not be imported
CUDA_ARCHS = ["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90"]
NVCC_FLAGS = ["-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", f"-I{ROOT / 'csrc'}"]


def find_compiler() -> str | None:
    """The C++ compiler to use (CXX if set, else the usual names), or None. BuildExtension raises without one."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((name for name in names if shutil.which(shlex.split(name)[0])), None)


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    inside = shutil.which("nvcc", path=str(Path(home, "bin"))) if home else None
    return None if os.environ.get("FASTCOLLAB_CUDA") == "0" else inside or shutil.which("nvcc")


def cuda_library_dirs(nvcc: str) -> list[str]:
    """Where nvcc itself would link from (it may be a wrapper script: its own folder says nothing)."""
    plan = subprocess.run([nvcc, "--dryrun", sources("csrc/cuda/*.cu")[0]], capture_output=True, text=True, check=True)
    lines = [line for line in plan.stderr.splitlines() if "LIBRARIES=" in line]
    return [flag[2:] for flag in shlex.split(lines[0].split("LIBRARIES=", 1)[1]) if flag.startswith("-L")]


def sources(*patterns: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def extensions(nvcc: str | None) -> list[Extension]:
    from torch.utils.cpp_extension import CppExtension

    headers = sources("csrc/**/*.h", "csrc/**/*.cu")
    bindings = [path for path in sources("csrc/bindings/*.cpp") if not path.endswith("/scheduler.cpp")]
    ops = CppExtension(
        "fastcollab._C",
        [*bindings, *sources("csrc/cpu/*.cpp")],
        include_dirs=[str(ROOT / "csrc")],
        depends=headers,
        define_macros=[("FASTCOLLAB_CUDA", "1")] if nvcc else [],
        extra_compile_args={"cxx": CXX_FLAGS + STABLE_ABI + ["-Wno-psabi"]},
        extra_link_args=["-Wl,--exclude-libs,ALL"] if sys.platform == "linux" else [],
        py_limited_api=True,
    )
    if nvcc:
        ops.library_dirs += cuda_library_dirs(nvcc)
        ops.libraries += ["cudart_static", "dl", "rt", "pthread"]  # static: the module imports where no CUDA is
    built = [ops]
    if (ROOT / "csrc/bindings/scheduler.cpp").exists():
        import pybind11

        built.append(
            Extension(
                "fastcollab._scheduler",
                ["csrc/bindings/scheduler.cpp", *sources("csrc/scheduler/*.cpp")],
                include_dirs=[str(ROOT / "csrc"), pybind11.get_include()],
                depends=headers,
                extra_compile_args={"cxx": CXX_FLAGS},
                language="c++",
            )
        )
    return built


def build_command(nvcc: str | None) -> type:
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        """Compiles csrc/cuda/*.cu as plain CUDA C++ by calling nvcc: CUDAExtension refuses a CPU-only torch."""

        def build_extensions(self) -> None:
            if nvcc:
                self.extensions[0].extra_objects += [self.compile_cuda(cu) for cu in sources("csrc/cuda/*.cu")]
            super().build_extensions()

        def compile_cuda(self, source: str) -> str:
            target = Path(self.build_temp).resolve() / Path(source).with_suffix(".cuda.o")
            target.parent.mkdir(parents=True, exist_ok=True)
            archs = [flag for arch in CUDA_ARCHS for flag in ("-gencode", arch)]
            subprocess.run([nvcc, *archs, *NVCC_FLAGS, "-c", source, "-o", str(target)], check=True, cwd=ROOT)
            return str(target)

    return Build


def main() -> None:
    os.chdir(ROOT)
    compiler, nvcc = find_compiler(), find_nvcc()
    folders = {"fastcollab.kernels": "kernels", "fastcollab.bench": "bench"}
    packages = ["fastcollab", *(f"fastcollab.{name}" for name in find_packages("fastcollab"))]
    for name, folder in folders.items():
        if (ROOT / folder).is_dir():
            packages += [name, *(f"{name}.{inner}" for inner in find_packages(folder))]
    built: dict = {}
    if compiler:
        os.environ["CXX"] = compiler
        built = {"ext_modules": extensions(nvcc), "cmdclass": {"build_ext": build_command(nvcc)}}
    else:
        wanted = os.environ.get("CXX") or "c++, g++ or clang++"
        print(f"warning: no C++ compiler ({wanted}) on PATH: fastcollab is installed as pure Python", file=sys.stderr)
    setup(packages=packages, package_dir=folders, **built)


if __name__ == "__main__":
    main()
