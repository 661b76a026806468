// The version and the revision that this module was built from.
#pragma once

#include <string>

#include "petps_revision.h"  // the build writes it (cmake/revision.cmake)

namespace petps::bindings {

// Return "petps 0.1.0 (1a2b3c4d5e6f)"; without the revision if the sources had no git.
inline std::string software() {
  const std::string revision = PETPS_REVISION;
  return "petps " PETPS_VERSION + (revision.empty() ? "" : " (" + revision + ")");
}

}  // namespace petps::bindings
