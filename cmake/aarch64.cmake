# Cross-compile for aarch64, and run the programs in QEMU's user-mode emulation (`make aarch64`).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
# A processor without `dc cvap`, which user-mode QEMU before 8.1 announces and does not execute.
set(CMAKE_CROSSCOMPILING_EMULATOR
  qemu-aarch64-static -cpu cortex-a72 -L /usr/aarch64-linux-gnu)
# QEMU takes 5 bytes of memory for each KiB of reserved addresses.
add_compile_definitions(PETPS_SMALL_RESERVATIONS)
