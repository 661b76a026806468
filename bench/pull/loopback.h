// Client sockets of the benches, and the address that they connect to: 127.0.0.1.
#pragma once

#include <netinet/in.h>

#include <cstdint>

namespace petps::bench {

sockaddr_in loopback(uint16_t port);
// Send small messages at once instead of waiting for more data (TCP_NODELAY).
void set_no_delay(int socket);
// Connect to a port of 127.0.0.1 and return the socket. Exit the program if that fails.
int connect_to_loopback(uint16_t port);

}  // namespace petps::bench
