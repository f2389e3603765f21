/// @file
/// A temporary folder of a benchmark.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>

namespace llmmem_bench {

/// A folder that its owner removes with its contents; forked children leave it.
class bench_folder {
 public:
  bench_folder() : path_("/tmp/llmmem-bench-" + std::string(6, 'X')) {
    if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("no temporary folder");
  }
  bench_folder(const bench_folder&) = delete;
  bench_folder& operator=(const bench_folder&) = delete;
  ~bench_folder() {
    std::error_code ignored;
    if (::getpid() == owner_) std::filesystem::remove_all(path_, ignored);
  }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
  pid_t owner_ = ::getpid();
};

}  // namespace llmmem_bench
