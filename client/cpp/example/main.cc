#include <cstdio>

#include "petps_client/client.h"

int main(int argc, char** argv) {  // example petps://127.0.0.1:7070/default users
  auto client = petps::client::Client::connect(argc > 1 ? argv[1] : "petps://127.0.0.1:7070");
  if (!client.ok()) return std::puts(client.status().to_string().c_str()), 1;
  auto table = (*client)->describe(argc > 2 ? argv[2] : "users");
  if (!table.ok()) return std::puts(table.status().to_string().c_str()), 1;
  const uint64_t keys[] = {17, 4711};
  std::vector<float> rows(2 * table->dim);  // float32[2, dim]
  auto report = (*client)->pull(table->name, keys, rows);
  if (!report.ok()) return std::puts(report.status().to_string().c_str()), 1;
  std::printf("%zu found, row 0 begins with %g\n", size_t{report->found}, rows[0]);
}
