# Writes OUTPUT, a header with the revision of SOURCE, if it has changed. Without git, as in
# the image of a container, it is that of the environment's PETPS_REVISION, or empty.
execute_process(COMMAND git -C "${SOURCE}" describe --always --dirty --abbrev=12 --exclude=*
                OUTPUT_VARIABLE revision OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT revision)
  set(revision "$ENV{PETPS_REVISION}")
endif()
set(text "#define PETPS_REVISION \"${revision}\"\n")
if(EXISTS "${OUTPUT}")
  file(READ "${OUTPUT}" before)
endif()
if(NOT text STREQUAL before)
  file(WRITE "${OUTPUT}" "${text}")
endif()
