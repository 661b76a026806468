# The two extension modules: petps._native (native/bindings) and petps_client._native
# (client/python). `cmake --preset` looks for Python and pybind11 in .venv first.
if(NOT Python_EXECUTABLE AND EXISTS "${PROJECT_SOURCE_DIR}/.venv/bin/python")
  set(Python_EXECUTABLE "${PROJECT_SOURCE_DIR}/.venv/bin/python")
endif()
find_package(Python 3.11 COMPONENTS Interpreter Development.Module)
if(Python_FOUND AND NOT pybind11_DIR)
  execute_process(COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
                  OUTPUT_VARIABLE pybind11_folder OUTPUT_STRIP_TRAILING_WHITESPACE
                  ERROR_QUIET RESULT_VARIABLE pybind11_missing)
  if(NOT pybind11_missing)
    set(pybind11_DIR "${pybind11_folder}" CACHE PATH "" FORCE)
  endif()
endif()
find_package(pybind11 CONFIG QUIET)
if(NOT pybind11_FOUND)
  if(SKBUILD)
    message(FATAL_ERROR "pybind11 is missing: install the build requirements of pyproject.toml")
  endif()
  message(STATUS "petps: pybind11 not found, no Python modules (run `make build` for them)")
  return()
endif()

add_custom_target(petps_python)

# petps_python_module(<target> FOLDER <folder> PACKAGE <package> LIBS <libraries...>)
function(petps_python_module target)
  cmake_parse_arguments(MODULE "" "FOLDER;PACKAGE" "LIBS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/${MODULE_FOLDER}/*.cc")
  if(NOT sources)
    return()
  endif()
  pybind11_add_module(${target} MODULE NO_EXTRAS ${sources})
  set_target_properties(${target} PROPERTIES
    OUTPUT_NAME _native
    LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/python/${MODULE_PACKAGE}")
  target_compile_options(${target} PRIVATE ${PETPS_WARNINGS})
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/native")
  target_compile_definitions(${target} PRIVATE PETPS_VERSION="${PROJECT_VERSION}")
  target_link_libraries(${target} PRIVATE ${MODULE_LIBS})
  install(TARGETS ${target} LIBRARY DESTINATION ${MODULE_PACKAGE} COMPONENT python)
  add_dependencies(petps_python ${target})
endfunction()

# The gRPC messages (petps/v1): grpcio-tools generates the Python from petps.proto. Never commit it.
set(petps_stubs petps/v1/petps_pb2.py petps/v1/petps_pb2_grpc.py)
list(TRANSFORM petps_stubs PREPEND "${PROJECT_BINARY_DIR}/python/")
add_custom_command(
  OUTPUT ${petps_stubs}
  COMMAND "${CMAKE_COMMAND}" -E make_directory "${PROJECT_BINARY_DIR}/python"
  COMMAND "${Python_EXECUTABLE}" -m grpc_tools.protoc "--proto_path=${PROJECT_SOURCE_DIR}"
          "--python_out=${PROJECT_BINARY_DIR}/python"
          "--grpc_python_out=${PROJECT_BINARY_DIR}/python" petps/v1/petps.proto
  DEPENDS petps/v1/petps.proto
  WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
  COMMENT "petps/v1: messages and service"
  VERBATIM)
add_custom_target(petps_stubs DEPENDS ${petps_stubs})
add_dependencies(petps_python petps_stubs)
install(FILES ${petps_stubs} DESTINATION petps/v1 COMPONENT python)

get_property(rooms GLOBAL PROPERTY PETPS_ROOMS)
list(REMOVE_ITEM rooms client)
list(TRANSFORM rooms PREPEND petps_)
petps_python_module(petps_native FOLDER native/bindings PACKAGE petps LIBS ${rooms})
petps_python_module(petps_client_native FOLDER client/python PACKAGE petps_client
                    LIBS petps_client)
