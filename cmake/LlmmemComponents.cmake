# The targets beside llmmem::llmmem that need a library of others. Read by our own build and by the installed
# package alike, so that both define the same targets. A function that finds its library adds the target; one
# that does not leaves the reason in llmmem_<component>_missing.
include_guard(GLOBAL)

# llmmem::xxhash: <xxhash.h>, used header-only.
macro(llmmem_component_xxhash)
  find_path(LLMMEM_XXHASH_INCLUDE_DIR xxhash.h DOC "Folder of xxhash.h; empty or -NOTFOUND: no llmmem::xxhash")
  mark_as_advanced(LLMMEM_XXHASH_INCLUDE_DIR)
  if(LLMMEM_XXHASH_INCLUDE_DIR AND NOT TARGET llmmem::xxhash)
    add_library(llmmem::xxhash INTERFACE IMPORTED GLOBAL)
    target_link_libraries(llmmem::xxhash INTERFACE llmmem::llmmem)
    target_include_directories(llmmem::xxhash INTERFACE "${LLMMEM_XXHASH_INCLUDE_DIR}")
  elseif(NOT LLMMEM_XXHASH_INCLUDE_DIR)
    set(llmmem_xxhash_missing "xxhash.h was not found (Debian: libxxhash-dev; https://xxhash.com)")
  endif()
endmacro()

# llmmem::nvtx: ranges for profilers, by <nvtx3/nvToolsExt.h> of the CUDA Toolkit. Define LLMMEM_NVTX everywhere in a
# program or nowhere: inline functions differ by it.
macro(llmmem_component_nvtx)
  find_path(
    LLMMEM_NVTX_INCLUDE_DIR nvtx3/nvToolsExt.h
    HINTS ENV CUDA_HOME ENV CUDA_PATH
    PATHS /usr/local/cuda
    PATH_SUFFIXES include
    DOC "Folder of nvtx3/; empty or -NOTFOUND: no llmmem::nvtx")
  mark_as_advanced(LLMMEM_NVTX_INCLUDE_DIR)
  if(LLMMEM_NVTX_INCLUDE_DIR AND NOT TARGET llmmem::nvtx)
    add_library(llmmem::nvtx INTERFACE IMPORTED GLOBAL)
    target_link_libraries(llmmem::nvtx INTERFACE llmmem::llmmem ${CMAKE_DL_LIBS})
    target_include_directories(llmmem::nvtx SYSTEM INTERFACE "${LLMMEM_NVTX_INCLUDE_DIR}")
    target_compile_definitions(llmmem::nvtx INTERFACE LLMMEM_NVTX)
  elseif(NOT LLMMEM_NVTX_INCLUDE_DIR)
    set(llmmem_nvtx_missing "nvtx3/nvToolsExt.h was not found (CUDA Toolkit, or https://github.com/NVIDIA/NVTX)")
  endif()
endmacro()

# llmmem::uring: liburing.
macro(llmmem_component_uring)
  find_path(LLMMEM_URING_INCLUDE_DIR liburing.h DOC "Folder of liburing.h; empty or -NOTFOUND: no llmmem::uring")
  find_library(LLMMEM_URING_LIBRARY uring DOC "liburing; empty or -NOTFOUND: no llmmem::uring")
  mark_as_advanced(LLMMEM_URING_INCLUDE_DIR LLMMEM_URING_LIBRARY)
  if(LLMMEM_URING_INCLUDE_DIR AND LLMMEM_URING_LIBRARY AND NOT TARGET llmmem::uring)
    add_library(llmmem::uring INTERFACE IMPORTED GLOBAL)
    target_link_libraries(llmmem::uring INTERFACE llmmem::llmmem "${LLMMEM_URING_LIBRARY}")
    target_include_directories(llmmem::uring INTERFACE "${LLMMEM_URING_INCLUDE_DIR}")
  elseif(NOT LLMMEM_URING_INCLUDE_DIR OR NOT LLMMEM_URING_LIBRARY)
    set(llmmem_uring_missing "liburing was not found (Debian: liburing-dev; https://github.com/axboe/liburing)")
  endif()
endmacro()

# llmmem::zstd: <zstd.h> and the library.
macro(llmmem_component_zstd)
  find_path(LLMMEM_ZSTD_INCLUDE_DIR zstd.h DOC "Folder of zstd.h; empty or -NOTFOUND: no llmmem::zstd")
  find_library(LLMMEM_ZSTD_LIBRARY zstd DOC "The zstd library; empty or -NOTFOUND: no llmmem::zstd")
  mark_as_advanced(LLMMEM_ZSTD_INCLUDE_DIR LLMMEM_ZSTD_LIBRARY)
  if(LLMMEM_ZSTD_INCLUDE_DIR AND LLMMEM_ZSTD_LIBRARY AND NOT TARGET llmmem::zstd)
    add_library(llmmem::zstd INTERFACE IMPORTED GLOBAL)
    target_link_libraries(llmmem::zstd INTERFACE llmmem::llmmem "${LLMMEM_ZSTD_LIBRARY}")
    target_include_directories(llmmem::zstd INTERFACE "${LLMMEM_ZSTD_INCLUDE_DIR}")
  elseif(NOT LLMMEM_ZSTD_INCLUDE_DIR OR NOT LLMMEM_ZSTD_LIBRARY)
    set(llmmem_zstd_missing "zstd was not found (Debian: libzstd-dev; https://facebook.github.io/zstd)")
  endif()
endmacro()

# llmmem::isal: ISA-L, Intel's storage acceleration library.
macro(llmmem_component_isal)
  find_path(LLMMEM_ISAL_INCLUDE_DIR isa-l/erasure_code.h
            DOC "Folder of isa-l/erasure_code.h; empty or -NOTFOUND: no llmmem::isal")
  find_library(LLMMEM_ISAL_LIBRARY isal DOC "The ISA-L library; empty or -NOTFOUND: no llmmem::isal")
  mark_as_advanced(LLMMEM_ISAL_INCLUDE_DIR LLMMEM_ISAL_LIBRARY)
  if(LLMMEM_ISAL_INCLUDE_DIR AND LLMMEM_ISAL_LIBRARY AND NOT TARGET llmmem::isal)
    add_library(llmmem::isal INTERFACE IMPORTED GLOBAL)
    target_link_libraries(llmmem::isal INTERFACE llmmem::llmmem "${LLMMEM_ISAL_LIBRARY}")
    target_include_directories(llmmem::isal INTERFACE "${LLMMEM_ISAL_INCLUDE_DIR}")
  elseif(NOT LLMMEM_ISAL_INCLUDE_DIR OR NOT LLMMEM_ISAL_LIBRARY)
    set(llmmem_isal_missing "ISA-L was not found (Debian: libisal-dev; https://github.com/intel/isa-l)")
  endif()
endmacro()

# llmmem::redis: hiredis, the C client of Redis, for pool/redis_directory.hpp.
macro(llmmem_component_redis)
  find_path(LLMMEM_HIREDIS_INCLUDE_DIR hiredis/hiredis.h DOC "Folder of hiredis/; empty or -NOTFOUND: no llmmem::redis")
  find_library(LLMMEM_HIREDIS_LIBRARY hiredis DOC "The hiredis library; empty or -NOTFOUND: no llmmem::redis")
  mark_as_advanced(LLMMEM_HIREDIS_INCLUDE_DIR LLMMEM_HIREDIS_LIBRARY)
  if(LLMMEM_HIREDIS_INCLUDE_DIR AND LLMMEM_HIREDIS_LIBRARY AND NOT TARGET llmmem::redis)
    add_library(llmmem::redis INTERFACE IMPORTED GLOBAL)
    target_link_libraries(llmmem::redis INTERFACE llmmem::llmmem "${LLMMEM_HIREDIS_LIBRARY}")
    target_include_directories(llmmem::redis INTERFACE "${LLMMEM_HIREDIS_INCLUDE_DIR}")
  elseif(NOT LLMMEM_HIREDIS_INCLUDE_DIR OR NOT LLMMEM_HIREDIS_LIBRARY)
    set(llmmem_redis_missing "hiredis was not found (Debian: libhiredis-dev; https://github.com/redis/hiredis)")
  endif()
endmacro()

# llmmem::ucx: UCX, for pool/ucx_mover.hpp.
macro(llmmem_component_ucx)
  find_path(LLMMEM_UCX_INCLUDE_DIR ucp/api/ucp.h DOC "Folder of ucp/; empty or -NOTFOUND: no llmmem::ucx")
  find_library(LLMMEM_UCP_LIBRARY ucp DOC "The ucp library of UCX; empty or -NOTFOUND: no llmmem::ucx")
  find_library(LLMMEM_UCS_LIBRARY ucs DOC "The ucs library of UCX; empty or -NOTFOUND: no llmmem::ucx")
  mark_as_advanced(LLMMEM_UCX_INCLUDE_DIR LLMMEM_UCP_LIBRARY LLMMEM_UCS_LIBRARY)
  if(LLMMEM_UCX_INCLUDE_DIR AND LLMMEM_UCP_LIBRARY AND LLMMEM_UCS_LIBRARY)
    if(NOT TARGET llmmem::ucx)
      add_library(llmmem::ucx INTERFACE IMPORTED GLOBAL)
      target_link_libraries(llmmem::ucx INTERFACE llmmem::llmmem "${LLMMEM_UCP_LIBRARY}" "${LLMMEM_UCS_LIBRARY}")
      target_include_directories(llmmem::ucx INTERFACE "${LLMMEM_UCX_INCLUDE_DIR}")
    endif()
  else()
    set(llmmem_ucx_missing "UCX was not found (Debian: libucx-dev; https://openucx.org)")
  endif()
endmacro()

# llmmem::openssl: OpenSSL 3, for comm/tls_wrapper.hpp. Only where it is asked for.
macro(llmmem_component_openssl)
  find_package(OpenSSL 3 QUIET COMPONENTS SSL)
  if(OPENSSL_FOUND AND NOT TARGET llmmem::openssl)
    add_library(llmmem::openssl INTERFACE IMPORTED GLOBAL)
    target_link_libraries(llmmem::openssl INTERFACE llmmem::llmmem OpenSSL::SSL)
  elseif(NOT OPENSSL_FOUND)
    set(llmmem_openssl_missing "OpenSSL 3 was not found (Debian: libssl-dev; https://openssl.org)")
  endif()
endmacro()

# llmmem::stdexec: stdexec's senders, for interop/fence_senders.hpp. Its headers are enough; an existing target of stdexec's own
# build comes first.
macro(llmmem_component_stdexec)
  find_path(
    LLMMEM_STDEXEC_INCLUDE_DIR stdexec/execution.hpp
    HINTS ENV STDEXEC_HOME
    PATH_SUFFIXES include
    DOC "Folder of stdexec/execution.hpp; empty or -NOTFOUND: no llmmem::stdexec")
  mark_as_advanced(LLMMEM_STDEXEC_INCLUDE_DIR)
  if(TARGET STDEXEC::stdexec AND NOT TARGET llmmem::stdexec)
    add_library(llmmem::stdexec INTERFACE IMPORTED GLOBAL)
    target_link_libraries(llmmem::stdexec INTERFACE llmmem::llmmem STDEXEC::stdexec)
  elseif(LLMMEM_STDEXEC_INCLUDE_DIR AND NOT TARGET llmmem::stdexec)
    add_library(llmmem::stdexec INTERFACE IMPORTED GLOBAL)
    target_link_libraries(llmmem::stdexec INTERFACE llmmem::llmmem)
    target_include_directories(llmmem::stdexec INTERFACE "${LLMMEM_STDEXEC_INCLUDE_DIR}")
  elseif(NOT TARGET llmmem::stdexec)
    set(llmmem_stdexec_missing
        "stdexec/execution.hpp was not found (a checkout of https://github.com/NVIDIA/stdexec); set LLMMEM_STDEXEC_INCLUDE_DIR or STDEXEC_HOME")
  endif()
endmacro()

# llmmem::nccl: <nccl.h>, the library, and the CUDA runtime that both need.
macro(llmmem_component_nccl)
  set(llmmem_nccl_roots "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}" "${CUDAToolkit_ROOT}" "${CUDAToolkit_TARGET_DIR}" /usr/local/cuda)
  find_path(LLMMEM_NCCL_INCLUDE_DIR nccl.h HINTS ${llmmem_nccl_roots} PATH_SUFFIXES include
            DOC "Folder of nccl.h; empty or -NOTFOUND: no llmmem::nccl")
  find_library(LLMMEM_NCCL_LIBRARY nccl HINTS ${llmmem_nccl_roots} PATH_SUFFIXES lib64 lib
               DOC "The NCCL library; empty or -NOTFOUND: no llmmem::nccl")
  mark_as_advanced(LLMMEM_NCCL_INCLUDE_DIR LLMMEM_NCCL_LIBRARY)
  if(LLMMEM_NCCL_INCLUDE_DIR AND LLMMEM_NCCL_LIBRARY)
    find_package(CUDAToolkit 12.8 QUIET)
  endif()
  if(NOT LLMMEM_NCCL_INCLUDE_DIR OR NOT LLMMEM_NCCL_LIBRARY)
    set(llmmem_nccl_missing "NCCL was not found (NVIDIA's repository: libnccl-dev; https://github.com/NVIDIA/nccl)")
  elseif(NOT CUDAToolkit_FOUND)
    set(llmmem_nccl_missing "the CUDA Toolkit 12.8 or newer was not found (https://developer.nvidia.com/cuda-toolkit)")
  elseif(NOT TARGET llmmem::nccl)
    add_library(llmmem::nccl INTERFACE IMPORTED GLOBAL)
    target_link_libraries(llmmem::nccl INTERFACE llmmem::llmmem "${LLMMEM_NCCL_LIBRARY}" CUDA::cudart_static)
    target_include_directories(llmmem::nccl INTERFACE "${LLMMEM_NCCL_INCLUDE_DIR}" ${CUDAToolkit_INCLUDE_DIRS})
  endif()
endmacro()

# llmmem::cufile: cuFile (GPUDirect Storage), of the toolkit or of the package nvidia-cufile.
macro(llmmem_component_cufile)
  find_package(CUDAToolkit 12.8 QUIET)
  find_path(LLMMEM_CUFILE_INCLUDE_DIR cufile.h
            HINTS ${CUDAToolkit_INCLUDE_DIRS}
            DOC "Folder of cufile.h; empty or -NOTFOUND: no llmmem::cufile")
  find_library(LLMMEM_CUFILE_LIBRARY
               NAMES cufile libcufile.so.0
               HINTS "${CUDAToolkit_LIBRARY_DIR}" "${LLMMEM_CUFILE_INCLUDE_DIR}/../lib"
               DOC "libcufile; empty or -NOTFOUND: no llmmem::cufile")
  mark_as_advanced(LLMMEM_CUFILE_INCLUDE_DIR LLMMEM_CUFILE_LIBRARY)
  if(NOT CUDAToolkit_FOUND)
    set(llmmem_cufile_missing "the CUDA Toolkit 12.8 or newer was not found (https://developer.nvidia.com/cuda-toolkit)")
  elseif(NOT LLMMEM_CUFILE_INCLUDE_DIR OR NOT LLMMEM_CUFILE_LIBRARY)
    set(llmmem_cufile_missing "cufile.h or libcufile was not found (package libcufile-dev of the toolkit, or pip install nvidia-cufile)")
  elseif(NOT TARGET llmmem::cufile)
    add_library(llmmem::cufile INTERFACE IMPORTED GLOBAL)
    target_link_libraries(llmmem::cufile INTERFACE llmmem::llmmem "${LLMMEM_CUFILE_LIBRARY}" CUDA::cudart_static)
    target_include_directories(llmmem::cufile INTERFACE "${LLMMEM_CUFILE_INCLUDE_DIR}")
  endif()
endmacro()

# llmmem::cccl: CCCL 3.2 or newer, which is newer than CUDA 13.0's own. Its folder must come before the toolkit's, also for
# nvcc, which searches those of -isystem after its own: hence no system folder. CCCL's headers silence warnings by themselves.
macro(llmmem_component_cccl)
  find_package(CUDAToolkit 12.8 QUIET)
  if(NOT TARGET CCCL::CCCL)
    find_path(LLMMEM_CCCL_INCLUDE_DIR cuda/memory_resource
              HINTS "$ENV{CCCL_HOME}" "${CUDAToolkit_ROOT}" "${CUDAToolkit_TARGET_DIR}" /usr/local/cuda
              PATH_SUFFIXES include include/cccl
              DOC "Folder of CCCL's <cuda/memory_resource>, version 3.2 or newer; empty or -NOTFOUND: no llmmem::cccl")
    mark_as_advanced(LLMMEM_CCCL_INCLUDE_DIR)
    set(llmmem_cccl_version 0)
    if(EXISTS "${LLMMEM_CCCL_INCLUDE_DIR}/cuda/std/__cccl/version.h")
      file(STRINGS "${LLMMEM_CCCL_INCLUDE_DIR}/cuda/std/__cccl/version.h" llmmem_cccl_version
           REGEX "^# *define CCCL_VERSION [0-9]+")
      string(REGEX REPLACE "[^0-9]" "" llmmem_cccl_version "${llmmem_cccl_version}")
    endif()
  endif()
  if(NOT CUDAToolkit_FOUND)
    set(llmmem_cccl_missing "the CUDA Toolkit 12.8 or newer was not found (https://developer.nvidia.com/cuda-toolkit)")
  elseif(NOT TARGET CCCL::CCCL AND llmmem_cccl_version LESS 3002000)
    set(llmmem_cccl_missing
        "CCCL 3.2 or newer was not found, but version ${llmmem_cccl_version} in '${LLMMEM_CCCL_INCLUDE_DIR}' (pip install nvidia-cuda-cccl; https://github.com/NVIDIA/cccl); set LLMMEM_CCCL_INCLUDE_DIR"
    )
  elseif(NOT TARGET llmmem::cccl)
    add_library(llmmem::cccl INTERFACE IMPORTED GLOBAL)
    set_target_properties(llmmem::cccl PROPERTIES IMPORTED_NO_SYSTEM ON SYSTEM OFF)
    if(TARGET CCCL::CCCL)
      target_link_libraries(llmmem::cccl INTERFACE llmmem::llmmem CCCL::CCCL CUDA::cudart_static)
    else()
      target_link_libraries(llmmem::cccl INTERFACE llmmem::llmmem CUDA::cudart_static)
      target_include_directories(llmmem::cccl INTERFACE "${LLMMEM_CCCL_INCLUDE_DIR}")
    endif()
  endif()
endmacro()

# llmmem::cuda: the runtime. The consumer's own nvcc flags and architectures stay his. No header here includes CCCL, so any
# generation of it may be beside.
macro(llmmem_component_cuda)
  find_package(CUDAToolkit 12.8 QUIET)
  if(NOT CUDAToolkit_FOUND)
    set(llmmem_cuda_missing "the CUDA Toolkit 12.8 or newer was not found (https://developer.nvidia.com/cuda-toolkit)")
  elseif(NOT TARGET llmmem::cuda)
    add_library(llmmem::cuda INTERFACE IMPORTED GLOBAL)
    target_link_libraries(llmmem::cuda INTERFACE llmmem::llmmem CUDA::cudart_static)
  endif()
endmacro()
