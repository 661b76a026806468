// What a fuzz target expects of the code that it drives: a false condition is a finding.
#pragma once

#include "base/check.h"

#define FUZZ_EXPECT(condition) PETPS_CHECK(condition, "a fuzz target expects this")
