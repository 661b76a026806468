// Tests of the pins of other processes: the file, its locks, and what servers and readers leave
// in it. A ReadersFile simulates a process here, because the locks belong to the open file.
#include "epoch/readers_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "epoch/epoch.h"

namespace petps::epoch {
namespace {

using base::Code;
constexpr ReadersFile::Uuid kPool = {1, 2, 3};
constexpr ReadersFile::Uuid kOther = {9};
constexpr uint64_t kNone = ~uint64_t{0};

class ReadersFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "/readersXXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    pool_ = folder_ / "pool";
    std::ofstream(pool_) << "pool";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::unique_ptr<ReadersFile> serve() {
    auto served = ReadersFile::serve(pool_, kPool);
    EXPECT_TRUE(served.ok()) << served.status().message();
    return served.ok() ? std::move(served).value() : nullptr;
  }
  std::unique_ptr<ReadersFile> join() {
    auto joined = ReadersFile::join(pool_);
    EXPECT_TRUE(joined.ok()) << joined.status().message();
    return joined.ok() ? std::move(joined).value() : nullptr;
  }
  // Claim a record and leave a pin at `epoch` in it.
  static void pin(ReadersFile& reader, uint64_t epoch) {
    Places* const places = reader.claim();
    ASSERT_NE(places, nullptr);
    places->window.store(8);
    places->epochs[3].store(epoch);
  }

  std::filesystem::path folder_;
  std::filesystem::path pool_;
};

TEST_F(ReadersFileTest, AServerSeesTheOldestPinAndDropsOnlyPinsOfTheDead) {
  const auto server = serve();
  EXPECT_EQ(server->oldest(), kNone);
  const auto living = join();
  auto dying = join();
  pin(*living, 7);
  pin(*dying, 5);
  server->drop_dead();
  EXPECT_EQ(server->oldest(), 5u);
  dying.reset();
  EXPECT_EQ(server->oldest(), 5u);
  server->drop_dead();
  EXPECT_EQ(server->oldest(), 7u);
}

TEST_F(ReadersFileTest, ARecordOfADeadReaderIsClaimedEmpty) {
  const auto server = serve();
  auto dying = join();
  pin(*dying, 5);
  dying.reset();
  const auto next = join();
  const Places* const places = next->claim();
  EXPECT_EQ(places->window.load(), 0u);
  EXPECT_EQ(places->epochs[3].load(), 0u);
  EXPECT_EQ(server->oldest(), kNone);
}

TEST_F(ReadersFileTest, RecordsAreLimitedAndNoneIsClaimedTwice) {
  const auto server = serve();
  const auto reader = join();
  auto other = join();
  std::vector<Places*> claimed;
  for (size_t i = 0; i < kMaxOutsideReaders; ++i) {
    Places* const places = (i % 2 == 0 ? *reader : *other).claim();
    ASSERT_NE(places, nullptr);
    places->epochs[0].store(i + 1);  // a second claim of the record would empty it
    claimed.push_back(places);
  }
  EXPECT_EQ(reader->claim(), nullptr);
  for (size_t i = 0; i < claimed.size(); ++i) EXPECT_EQ(claimed[i]->epochs[0].load(), i + 1);
  other.reset();
  EXPECT_NE(reader->claim(), nullptr);
}

TEST_F(ReadersFileTest, AServerTakesOverThePinsOfReadersThatOutlivedTheLastServer) {
  auto server = serve();
  server->global().store(41);
  const auto reader = join();
  pin(*reader, 40);
  server.reset();  // killed
  const auto next = serve();
  EXPECT_EQ(next->global().load(), 41u);
  EXPECT_EQ(next->oldest(), 40u);
  next->remove();
  EXPECT_TRUE(std::filesystem::exists(readers_path(pool_)));
}

TEST_F(ReadersFileTest, AServerWithoutReadersCreatesTheFileAgainAndRemovesOnlyItsOwn) {
  auto server = serve();
  server->global().store(41);
  server.reset();
  server = serve();
  EXPECT_EQ(server->global().load(), 1u);
  // The readers file of another pool that has taken the name of this one.
  std::filesystem::rename(readers_path(pool_), folder_ / "ours");
  std::ofstream(readers_path(pool_)) << "theirs";
  server->remove();
  EXPECT_TRUE(std::filesystem::exists(readers_path(pool_)));
  std::filesystem::rename(folder_ / "ours", readers_path(pool_));
  server->remove();
  EXPECT_FALSE(std::filesystem::exists(readers_path(pool_)));
}

TEST_F(ReadersFileTest, EarlierPinsAreThoseFromBeforeShare) {
  auto first = std::make_unique<Domain>();
  first->share(serve());
  Domain reader;
  reader.share(join());
  Reader* const list = reader.lease();
  Pin before = list->pin();
  first.reset();
  Domain server;
  server.share(serve());
  EXPECT_TRUE(server.earlier_pins());
  const Pin after = list->pin();
  EXPECT_TRUE(server.earlier_pins());
  before.drop();
  EXPECT_FALSE(server.earlier_pins());
  EXPECT_TRUE(server.outside_pins());
}

TEST_F(ReadersFileTest, AServerRefusesToOpenBesideReadersWhosePinsAreInAnotherFile) {
  auto server = serve();
  const auto reader = join();
  server.reset();
  EXPECT_EQ(ReadersFile::serve(pool_, kOther).status().code(), Code::kFailedPrecondition);
  std::filesystem::rename(readers_path(pool_), folder_ / "elsewhere");
  EXPECT_FALSE(ReadersFile::serve(pool_, kPool).ok());
  std::filesystem::copy(folder_ / "elsewhere", readers_path(pool_));
  EXPECT_EQ(ReadersFile::serve(pool_, kPool).status().code(), Code::kFailedPrecondition);
  EXPECT_TRUE(reader->belongs_to(kPool).ok());
  EXPECT_FALSE(reader->belongs_to(kOther).ok());
  std::filesystem::rename(pool_, folder_ / "renamed");
  EXPECT_FALSE(reader->belongs_to(kPool).ok());
}

// A limit on the size of a file simulates a full disk.
TEST_F(ReadersFileTest, IfTheFileCannotBeCreatedReadersAreKeptOut) {
  rlimit before = {};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small = {4096, before.rlim_max};
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  auto server = serve();
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, handler);
  EXPECT_NE(server->refused().find("pool.readers"), std::string::npos) << server->refused();
  EXPECT_FALSE(std::filesystem::exists(readers_path(pool_)));
  EXPECT_EQ(server->oldest(), kNone);
  EXPECT_EQ(ReadersFile::join(pool_).status().code(), Code::kFailedPrecondition);
  Domain domain;  // works without the file
  domain.share(std::move(server));
  EXPECT_EQ(domain.current(), 1u);
  EXPECT_FALSE(domain.earlier_pins());
}

// NFS turns the writer's own flock into a write lock of all bytes; another open file takes such a
// lock here.
TEST_F(ReadersFileTest, IfFlockLocksAllBytesTheServerServesAndReadersAreKeptOut) {
  const int writer = ::open(pool_.c_str(), O_RDWR);
  struct flock whole = {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  ASSERT_EQ(fcntl(writer, F_OFD_SETLK, &whole), 0);
  const auto server = serve();
  ASSERT_NE(server, nullptr);
  EXPECT_NE(server->refused().find("NFS"), std::string::npos) << server->refused();
  const auto reader = ReadersFile::join(pool_);
  EXPECT_EQ(reader.status().code(), Code::kFailedPrecondition);
  EXPECT_NE(reader.status().message().find("keeps readers out"), std::string_view::npos);
  ::close(writer);
}

// A server must not serve beside a reader whose pins it cannot see.
TEST_F(ReadersFileTest, IfTheFileCannotBeOpenedBesideAReaderTheServerRefuses) {
  auto server = serve();
  const auto reader = join();
  server.reset();
  std::filesystem::remove(readers_path(pool_));
  std::filesystem::create_directory(readers_path(pool_));
  EXPECT_FALSE(ReadersFile::serve(pool_, kPool).ok());
}

TEST_F(ReadersFileTest, AForkedChildSharesNeitherPinsNorLocks) {
  const auto server = serve();
  auto reader = join();
  pin(*reader, 5);
  int to_child[2];
  int from_child[2];
  ASSERT_EQ(pipe(to_child), 0);
  ASSERT_EQ(pipe(from_child), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(to_child[1]);
    reader->global().store(99);  // the child's own copy
    char byte = reader->forked() ? 1 : 0;
    byte = static_cast<char>(write(from_child[1], &byte, 1));
    byte = static_cast<char>(read(to_child[0], &byte, 1));  // wait until the parent has checked
    _exit(0);
  }
  char forked = 0;
  ASSERT_EQ(read(from_child[0], &forked, 1), 1);
  EXPECT_EQ(forked, 1);
  EXPECT_FALSE(reader->forked());
  EXPECT_EQ(server->global().load(), 1u);
  server->drop_dead();
  EXPECT_EQ(server->oldest(), 5u);
  reader.reset();  // simulates the death of the parent; the child lives on
  server->drop_dead();
  EXPECT_EQ(server->oldest(), kNone);
  for (const int end : {to_child[0], to_child[1], from_child[0], from_child[1]}) close(end);
  waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace petps::epoch
