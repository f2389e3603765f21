// cuFile itself, on a machine without a device: the reason is reported, and nothing waits.
#include <llmmem/device/cuda.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/transfer/cufile_library.hpp>
#include <llmmem/transfer/device_file_space.hpp>

#include <cstdio>
#include <string>

using disk = llmmem::device_file_space<llmmem::streamed_device_space, llmmem::cufile_io>;
static_assert(llmmem::straight_queue<disk, llmmem::streamed_device_space>);
static_assert(llmmem::io_engine<llmmem::cufile_io>);
template class llmmem::device_file_io<llmmem::cufile_library>;

int main() {
  const char* const why = llmmem::cufile_library{}.why_not();
  if (why == nullptr) {
    std::printf("cuFile works here: what this program tests needs a machine without a device\n");
    return 77;
  }
  try {
    const llmmem::cufile_io io;
  } catch (const llmmem::system_error& refused) {
    std::printf("%s\n", refused.what());
    return std::string(refused.what()) == "device_file_io: " + std::string(why) ? 0 : 1;
  }
  return 1;
}
