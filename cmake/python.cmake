# The two extension modules: petps._native (native/bindings) and petps_client._native
# (client/python). `cmake --preset` looks for Python and pybind11 in .venv first.
if(NOT Python_EXECUTABLE AND EXISTS "${PROJECT_SOURCE_DIR}/.venv/bin/python")
  set(Python_EXECUTABLE "${PROJECT_SOURCE_DIR}/.venv/bin/python")
endif()
find_package(Python 3.10 COMPONENTS Interpreter Development.Module)
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

# The modules of each distribution: petps (pyproject.toml), petps-client (client/python).
add_custom_target(petps_python)
add_custom_target(petps_client_python)

# petps_python_module(<target> FOLDER <folder> PACKAGE <package> PART <part> LIBS <libraries...>)
#
# PART is the custom target and the install component of a distribution.
function(petps_python_module target)
  cmake_parse_arguments(MODULE "" "FOLDER;PACKAGE;PART" "LIBS" ${ARGN})
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
  install(TARGETS ${target} LIBRARY DESTINATION ${MODULE_PACKAGE} COMPONENT ${MODULE_PART})
  add_dependencies(petps_${MODULE_PART} ${target})
endfunction()

# The gRPC messages: petps_pb2.py and admin_pb2.py make their classes from these descriptors.
foreach(proto petps/v1/petps.proto petps/admin/admin.proto)
  get_filename_component(folder "${proto}" DIRECTORY)
  set(descriptor "${PROJECT_BINARY_DIR}/python/${folder}/descriptor.py")
  add_custom_command(
    OUTPUT "${descriptor}"
    COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/compile_proto.py"
            "${PROJECT_SOURCE_DIR}" "${proto}" "${descriptor}"
    DEPENDS "${PROJECT_SOURCE_DIR}/${proto}" "${PROJECT_SOURCE_DIR}/cmake/compile_proto.py"
    COMMENT "${folder}: descriptor"
    VERBATIM)
  list(APPEND petps_descriptors "${descriptor}")
  install(FILES "${descriptor}" DESTINATION "${folder}" COMPONENT python)
endforeach()
# The remedies that the status page links to (petps/server/docs_folder.py).
foreach(folder how-to runbook reference/errors)
  if(EXISTS "${PROJECT_SOURCE_DIR}/docs/${folder}")
    install(DIRECTORY "${PROJECT_SOURCE_DIR}/docs/${folder}/" DESTINATION "petps/docs/${folder}"
            COMPONENT python FILES_MATCHING PATTERN "*.md" PATTERN pictures EXCLUDE)
  endif()
endforeach()
add_custom_target(petps_proto DEPENDS ${petps_descriptors})
add_dependencies(petps_python petps_proto)

# The revision is looked up in every build: one that a configure step noted would soon be wrong.
set(petps_generated "${PROJECT_BINARY_DIR}/generated")
add_custom_target(petps_revision
  COMMAND "${CMAKE_COMMAND}" "-DSOURCE=${PROJECT_SOURCE_DIR}"
          "-DOUTPUT=${petps_generated}/petps_revision.h"
          -P "${PROJECT_SOURCE_DIR}/cmake/revision.cmake"
  BYPRODUCTS "${petps_generated}/petps_revision.h"
  VERBATIM)

get_property(rooms GLOBAL PROPERTY PETPS_ROOMS)
list(REMOVE_ITEM rooms client)
list(TRANSFORM rooms PREPEND petps_)
petps_python_module(petps_native FOLDER native/bindings PACKAGE petps PART python
                    LIBS ${rooms})
target_include_directories(petps_native PRIVATE "${petps_generated}")
add_dependencies(petps_native petps_revision)
petps_python_module(petps_client_native FOLDER client/python PACKAGE petps_client
                    PART client_python LIBS petps_client)
