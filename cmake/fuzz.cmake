# The fuzz targets: fuzz_<name> of tests/fuzz/<name>.cc, with libFuzzer, ASan and UBSan. Only clang
# has libFuzzer: cmake --preset fuzz.
foreach(target wire codec pool tls)
  add_executable(fuzz_${target} "${PROJECT_SOURCE_DIR}/tests/fuzz/${target}.cc")
  target_compile_options(fuzz_${target} PRIVATE ${PETPS_TEST_WARNINGS})
  target_include_directories(fuzz_${target} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_options(fuzz_${target} PRIVATE -fsanitize=fuzzer)
  list(APPEND petps_fuzz_targets fuzz_${target})
endforeach()
target_link_libraries(fuzz_wire PRIVATE petps_wire)
target_link_libraries(fuzz_codec PRIVATE petps_codec)
target_link_libraries(fuzz_pool PRIVATE petps_table)
target_sources(fuzz_tls PRIVATE
  "${PROJECT_SOURCE_DIR}/tests/support/certificates/certificates.cc")
target_link_libraries(fuzz_tls PRIVATE petps_tls)
add_custom_target(petps_fuzz DEPENDS ${petps_fuzz_targets})
