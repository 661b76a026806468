# The test programs. test_<room> consists of tests/native/<room>/*.cc and links that room.
# test_<suite> consists of tests/<suite>/*.cc and links every room. Each test case is one ctest
# entry with its room as label and a time limit, because a hang is a failure.
if(CMAKE_CROSSCOMPILING)  # Debian's library is of the processor that compiles
  add_subdirectory(/usr/src/googletest/googletest googletest EXCLUDE_FROM_ALL)
else()
  find_package(GTest REQUIRED)
endif()
include(GoogleTest)
get_property(PETPS_ROOMS GLOBAL PROPERTY PETPS_ROOMS)
list(TRANSFORM PETPS_ROOMS PREPEND petps_ OUTPUT_VARIABLE PETPS_ROOM_LIBRARIES)

set(PETPS_TEST_SLOWDOWN 1)
if(PETPS_SANITIZE)
  set(PETPS_TEST_SLOWDOWN 4)
elseif(CMAKE_CROSSCOMPILING)  # an emulated processor
  set(PETPS_TEST_SLOWDOWN 10)
endif()

# The sources of a program are compiled in groups, because otherwise the compiler spends most of its
# time on the same templates in every file. The files below reuse names of other files, so each is
# compiled alone. If a new file fails with "redefinition", add it here.
set(PETPS_COMPILED_ALONE
  tests/crash/writeback.cc tests/crash/writeback_test.cc
  tests/lab/pool/rounds.cc tests/native/client/late_push_test.cc
  tests/native/client/host_test.cc tests/native/client/overlap_test.cc
  tests/native/client/partial_test.cc
  tests/native/client/rdma_test.cc tests/native/client/retry_test.cc
  tests/native/client/shards_push_test.cc tests/native/client/shards_test.cc
  tests/native/client/tls_test.cc
  tests/native/client/versions_test.cc
  tests/native/epoch/epoch_test.cc
  tests/native/media/file_test.cc tests/native/media/simulated_medium_test.cc
  tests/native/media/sync_test.cc
  tests/native/server/concurrency_test.cc tests/native/server/limits_test.cc
  tests/native/server/soak_test.cc
  tests/native/table/golden_pool_test.cc tests/native/table/hot_test.cc
  tests/native/table/recount_test.cc tests/native/table/table_test.cc)
set_source_files_properties(${PETPS_COMPILED_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
set(CMAKE_UNITY_BUILD ON)
set(PETPS_TEST_SANITIZE "")
if(PETPS_SANITIZE MATCHES "undefined")
  # UBSan checks the shipped code. In the tests themselves it would double the time of the build.
  set(PETPS_TEST_SANITIZE -fno-sanitize=undefined)
endif()

# petps_tests(<label> FOLDER <folder> TIMEOUT <seconds> LIBS <libraries...> [COST <number>]): add
# test_<label>. Tests of greater cost begin first, so that no long one is left alone at the end.
function(petps_tests label)
  cmake_parse_arguments(SUITE "" "FOLDER;TIMEOUT;COST" "LIBS" ${ARGN})
  if(NOT SUITE_COST)
    set(SUITE_COST 0)
  endif()
  file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/${SUITE_FOLDER}/*.cc")
  if(NOT sources)
    return()
  endif()
  add_executable(test_${label} ${sources})
  target_compile_options(test_${label} PRIVATE ${PETPS_TEST_WARNINGS} ${PETPS_TEST_SANITIZE})
  target_include_directories(test_${label} PRIVATE "${PROJECT_SOURCE_DIR}/${SUITE_FOLDER}"
                                                   "${PROJECT_SOURCE_DIR}")
  target_compile_definitions(test_${label} PRIVATE
    PETPS_GOLDEN_FOLDER="tests/golden")
  target_link_libraries(test_${label} PRIVATE ${SUITE_LIBS} GTest::gtest_main)
  math(EXPR limit "${SUITE_TIMEOUT} * ${PETPS_TEST_SLOWDOWN}")
  gtest_discover_tests(test_${label}
    TEST_PREFIX "${label}."
    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
    DISCOVERY_MODE PRE_TEST
    DISCOVERY_TIMEOUT 60
    PROPERTIES LABELS ${label} TIMEOUT ${limit} COST ${SUITE_COST})
  set_property(GLOBAL APPEND PROPERTY PETPS_TEST_PROGRAMS test_${label})
endfunction()

# The simulated medium of the crash suite, included as "tests/native/media/simulated_medium.h". Its
# own tests are in the same folder.
add_library(petps_simulated_medium STATIC EXCLUDE_FROM_ALL
  "${PROJECT_SOURCE_DIR}/tests/native/media/simulated_crash.cc"
  "${PROJECT_SOURCE_DIR}/tests/native/media/simulated_medium.cc")
target_compile_options(petps_simulated_medium PRIVATE ${PETPS_TEST_WARNINGS} ${PETPS_TEST_SANITIZE})
target_link_libraries(petps_simulated_medium PUBLIC petps_media GTest::gtest)

# RDMA devices in memory, for tests of rooms above transport. test_contract compiles its own copy.
add_library(petps_fake_verbs STATIC EXCLUDE_FROM_ALL
  "${PROJECT_SOURCE_DIR}/tests/contract/fake_verbs.cc")
target_compile_options(petps_fake_verbs PRIVATE ${PETPS_TEST_WARNINGS} ${PETPS_TEST_SANITIZE})
target_link_libraries(petps_fake_verbs PUBLIC petps_transport)

# A transport in memory: tests decide when and in what order frames arrive.
file(GLOB loopback CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/support/loopback/*.cc")
add_library(petps_loopback STATIC EXCLUDE_FROM_ALL ${loopback})
target_compile_options(petps_loopback PRIVATE ${PETPS_TEST_WARNINGS} ${PETPS_TEST_SANITIZE})
target_include_directories(petps_loopback PUBLIC "${PROJECT_SOURCE_DIR}")
target_link_libraries(petps_loopback PUBLIC petps_transport)

# Certificates, which tests make themselves.
add_library(petps_certificates STATIC EXCLUDE_FROM_ALL
  "${PROJECT_SOURCE_DIR}/tests/support/certificates/certificates.cc")
target_compile_options(petps_certificates PRIVATE ${PETPS_TEST_WARNINGS} ${PETPS_TEST_SANITIZE})
target_include_directories(petps_certificates PUBLIC "${PROJECT_SOURCE_DIR}")
target_link_libraries(petps_certificates PUBLIC petps_tls)

# Servers of a fleet and raw clients, for the router's tests.
add_library(petps_router_doubles STATIC EXCLUDE_FROM_ALL
  "${PROJECT_SOURCE_DIR}/tests/native/client/real_server.cc"
  "${PROJECT_SOURCE_DIR}/tests/native/client/fake_server.cc"
  "${PROJECT_SOURCE_DIR}/tests/native/client/drip.cc"
  "${PROJECT_SOURCE_DIR}/tests/native/server/raw_client.cc")
target_compile_options(petps_router_doubles PRIVATE ${PETPS_TEST_WARNINGS} ${PETPS_TEST_SANITIZE})
target_include_directories(petps_router_doubles PRIVATE "${PROJECT_SOURCE_DIR}")
target_link_libraries(petps_router_doubles PUBLIC petps_loopback ${PETPS_ROOM_LIBRARIES}
                      GTest::gtest)

foreach(room ${PETPS_ROOMS})
  if(room STREQUAL "client")
    petps_tests(client FOLDER tests/native/client TIMEOUT 60
                LIBS petps_fake_verbs petps_certificates ${PETPS_ROOM_LIBRARIES})
  else()
    set(doubles "")
    if(room MATCHES "^(pool|index|table)$")
      set(doubles petps_simulated_medium)
    elseif(room STREQUAL "server")
      set(doubles petps_fake_verbs petps_loopback petps_certificates)
    elseif(room STREQUAL "tls")
      set(doubles petps_certificates)
    elseif(room STREQUAL "router")
      set(doubles petps_loopback petps_certificates petps_router_doubles ${PETPS_ROOM_LIBRARIES})
    endif()
    petps_tests(${room} FOLDER tests/native/${room} TIMEOUT 60 LIBS ${doubles} petps_${room})
  endif()
endforeach()
foreach(suite contract crash stress)
  set(cost 0)
  if(suite STREQUAL "crash")
    set(cost 1)
  endif()
  petps_tests(${suite} FOLDER tests/${suite} TIMEOUT 300 COST ${cost}
              LIBS petps_simulated_medium petps_loopback petps_certificates ${PETPS_ROOM_LIBRARIES})
endforeach()

# The model compiles index and epoch a second time, so that each shared access is one step of its
# machine. It switches stacks on one thread, which sanitizers cannot follow: plain builds only.
if(NOT PETPS_SANITIZE)
  petps_tests(model FOLDER tests/model TIMEOUT 1200 COST 2 LIBS petps_pool)
  file(GLOB modelled CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/native/index/*.cc"
                                       "${PROJECT_SOURCE_DIR}/native/epoch/*.cc")
  target_sources(test_model PRIVATE ${modelled})
  target_compile_definitions(test_model PRIVATE
    PETPS_MODEL_ATOMICS="tests/model/atomics.h")

  # Operations on a pool whose file system fails, for the guest of `make lab`. The model of suite
  # crash (tests/crash/world.cc) defines which content is right.
  add_executable(lab_pool
    tests/lab/pool/main.cc tests/lab/pool/power.cc tests/lab/pool/rounds.cc tests/lab/pool/steps.cc
    tests/crash/world.cc)
  target_compile_options(lab_pool PRIVATE ${PETPS_TEST_WARNINGS})
  target_include_directories(lab_pool PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(lab_pool PRIVATE petps_table)
  set_property(GLOBAL APPEND PROPERTY PETPS_TEST_PROGRAMS lab_pool)
endif()

get_property(programs GLOBAL PROPERTY PETPS_TEST_PROGRAMS)
add_custom_target(petps_tests DEPENDS ${programs})
