// The answers to requests, by the servers. Internal to router.
#pragma once

#include "base/status.h"
#include "router/calls.h"

namespace petps::router {

struct Shared;

// Answer the job: fill its reply, its code and its counts. It waits for servers.
void answer(Shared& shared, Job& job);

// The answers to pulls and pushes: pull.cc and push.cc.
base::Status pull(Shared& shared, Job& job);
base::Status push(Shared& shared, Job& job);

// Return the error for a table that the caller's list does not have.
base::Status unknown_table(uint32_t id);

}  // namespace petps::router
