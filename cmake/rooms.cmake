# petps_room(<name> DEPS <rooms...> LIBS <external...> INCLUDES <folders...>)
#
# Add the static library petps_<name> of every *.cc below the calling folder. Headers are included
# from native/ ("epoch/epoch.h", "trainer/route/route.h"). A room without sources becomes an
# INTERFACE library.
function(petps_room name)
  cmake_parse_arguments(ROOM "" "" "DEPS;LIBS;INCLUDES" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/*.cc")
  list(TRANSFORM ROOM_DEPS PREPEND petps_)
  if(sources)
    add_library(petps_${name} STATIC ${sources})
    set(scope PUBLIC)
    target_compile_options(petps_${name} PRIVATE ${PETPS_WARNINGS})
  else()
    add_library(petps_${name} INTERFACE)
    set(scope INTERFACE)
  endif()
  target_include_directories(petps_${name} ${scope} "${PROJECT_SOURCE_DIR}/native"
                             ${ROOM_INCLUDES})
  target_link_libraries(petps_${name} ${scope} ${ROOM_DEPS} ${ROOM_LIBS} Threads::Threads)
  set_property(GLOBAL APPEND PROPERTY PETPS_ROOMS ${name})
endfunction()
