// The answers to requests, by the servers. Internal to router.
#pragma once

#include <span>

#include "base/status.h"
#include "router/calls.h"

namespace petps::router {

struct Shared;

// Send the servers the requests of a pull, if that needs no waiting. Return false if it does, or if
// the pull is wrong: then answer() says why.
bool start_pull(Shared& shared, Job& job);

// Answer the job: fill its reply, its code and its counts. It waits for servers, except for a
// started pull that is done.
void answer(Shared& shared, Job& job);
// Return whether the job finds its caller: a hello, or the first request of a connection without.
bool is_login(const Job& job);

// Return the refusal of a request for tables that nobody has, unless a server refuses it first: no
// other request of the call reaches one, to refuse a revoked token and count the request.
base::Status refuse_unknown(const Shared& shared, const Job& job, base::Status refusal);

// Return the refusal of a request that does not fit its tables as the router knows them; or that
// one is unknown, if it was dropped and created again: then the peer lists the tables.
base::Status refuse_unfit(const Shared& shared, const Job& job, std::span<const uint32_t> tables,
                          base::Status refusal);

// Return the memory that a request takes until it is answered, without its reply.
size_t request_bytes(const wire::FrameHeader& header, size_t frame_bytes);

// The answers to pulls and pushes: pull.cc and push.cc.
base::Status pull(Shared& shared, Job& job);
base::Status push(Shared& shared, Job& job);

// Return the error for a table that the caller's list does not have.
base::Status unknown_table(uint32_t id);

}  // namespace petps::router
