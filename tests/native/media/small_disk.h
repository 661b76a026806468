// A small file system in a file, mounted for one test. It needs root and mkfs; without them the
// test is skipped, with the reason.
#pragma once

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "temporary_folder.h"

namespace petps::testing_support {

class SmallDisk {
 public:
  // kind: "tmpfs", or a kind of mkfs ("ext2", "ext4", "xfs", "btrfs"), with options if needed.
  // image: the file that holds the blocks; if empty, a new one.
  SmallDisk(const std::string& kind, uint64_t bytes, std::string image = "") {
    const std::string size = std::to_string(bytes);
    mount_point_ = folder_.path("disk");
    if (mkdir(mount_point_.c_str(), 0700) != 0) std::abort();
    if (geteuid() != 0) {
      missing_ = "mounting needs root";
    } else if (kind == "tmpfs") {
      need("mount -t tmpfs -o size=" + size + " petps_test " + mount_point_);
    } else {
      if (image.empty()) image = folder_.path("image");
      need("truncate -s " + size + " " + image) && need("mkfs." + kind + " -q " + image) &&
          need("mount -o loop " + image + " " + mount_point_);
    }
    is_mounted_ = missing_.empty();
  }
  ~SmallDisk() {
    if (is_mounted_ && umount(mount_point_.c_str()) != 0) umount2(mount_point_.c_str(), MNT_DETACH);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

  // Return why there is no disk; empty if there is one.
  const std::string& missing() const { return missing_; }
  std::string path(const std::string& name) const { return mount_point_ + "/" + name; }

  // Write a file until no block is left.
  void fill(const std::string& name = "filler") const {
    const int file = ::open(path(name).c_str(), O_WRONLY | O_CREAT, 0600);
    const std::vector<char> piece(1 << 16, 'f');
    for (size_t bytes : {piece.size(), size_t{4096}, size_t{512}}) {
      while (::write(file, piece.data(), bytes) > 0) {
      }
      fsync(file);  // delayed allocation may have promised a block twice; now it fails
    }
    ::close(file);
  }
  void empty(const std::string& name = "filler") const {
    unlink(path(name).c_str());
    ::sync();  // btrfs and xfs free the blocks only now
  }

  static bool run(const std::string& command) {
    return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
  }

 private:
  bool need(const std::string& command) {
    if (run(command)) return true;
    missing_ = "`" + command + "` failed";
    return false;
  }
  TemporaryFolder folder_;
  std::string mount_point_;
  std::string missing_;
  bool is_mounted_ = false;
};

}  // namespace petps::testing_support
