// The weakened memory orders that no scenario catches. Each has a reason: the machine cannot show
// the fault, or nothing depends on the order. A name is file:function, the number of the site in
// the function, and the way in which the site is weakened.
#pragma once

#include <map>
#include <string>

namespace petps::model {

inline constexpr const char* kUnderALock =
    "the lock or mutex that the thread holds orders every store that this access could miss";
inline constexpr const char* kHint =
    "a guess: the code that uses it checks again (prefetch, move() under locks, the exchange that "
    "follows)";
inline constexpr const char* kLastLoad =
    "the last load of a search: earlier loads acquired, and no later load depends on this one";
inline constexpr const char* kCarried =
    "a later release store of the same thread carries it; no thread acts on it before that one";
inline constexpr const char* kNothingToOrder =
    "on this side of the exchange nothing was stored, or is read, that it would order";
inline constexpr const char* kTrueMiss =
    "from this store on a miss is true; a thread that knows that the key came back knows it by a "
    "later order";
inline constexpr const char* kLoadBeforeStore =
    "keeps a load of a row before a later store to it; the machine runs loads in order, so it "
    "cannot show the opposite. EPOCH.md has the proof: the last read comes before the reuse";
inline constexpr const char* kProofOnly =
    "no scenario shows it within the bounds. The proof at Index::fill_entry uses it, so it stays";

inline const std::map<std::string, const char*>& argued() {
  static const std::map<std::string, const char*> all = {
      {"epoch.cc:claim 2 store does not release", kLoadBeforeStore},
      {"epoch.cc:oldest_locked 2 load does not acquire", kLoadBeforeStore},
      {"epoch.cc:pin 1 load does not acquire", kLoadBeforeStore},
      {"epoch.cc:retire 1 add does not acquire", kUnderALock},
      {"epoch.h:drop 1 store does not release", kLoadBeforeStore},
      {"find.cc:prefetch_second 1 load does not acquire", kHint},
      {"find.cc:match_home 2 load does not acquire", kHint},
      {"find.cc:match_tags 1 load does not acquire", kProofOnly},
      {"find.cc:match_tags 2 load does not acquire", kProofOnly},
      {"find.cc:read_bucket 4 load does not acquire", kLastLoad},
      {"find.cc:read_home 1 load does not acquire", kProofOnly},
      {"find.cc:read_home 3 load does not acquire", kProofOnly},
      {"find.cc:read_home 4 load does not acquire", kLastLoad},
      {"find.cc:read_home 6 load does not acquire", kLastLoad},
      {"find.cc:scan_bucket 4 load does not acquire", kLastLoad},
      {"find.cc:scan_bucket 5 load does not acquire", kLastLoad},
      {"find.cc:search 2 load does not acquire", kProofOnly},
      {"move.cc:evict 1 load does not acquire", kHint},
      {"move.cc:evict 2 load does not acquire", kHint},
      {"move.cc:rehome_bucket 1 load does not acquire", kHint},
      {"move.cc:rehome_bucket 2 load does not acquire", kHint},
      {"write.cc:count_rows 1 load does not acquire", kUnderALock},
      {"write.cc:empty_entry 1 load does not acquire", kUnderALock},
      {"write.cc:erase_at 1 store does not release", kTrueMiss},
      {"write.cc:fill_entry 3 store does not release", kCarried},
      {"write.cc:heal 1 load does not acquire", kUnderALock},
      {"write.cc:heal 2 store does not release", kCarried},
      {"write.cc:heal 3 load does not acquire", kUnderALock},
      {"write.cc:lower_counters 1 load does not acquire", kHint},
      {"write.cc:lower_counters 2 exchange does not acquire", kNothingToOrder},
      {"write.cc:raise_counter 1 load does not acquire", kHint},
      {"write.cc:raise_counter 2 exchange does not acquire", kNothingToOrder},
      {"write.cc:raise_counter 2 exchange does not release", kCarried},
      {"write.cc:replace 1 load does not acquire", kUnderALock},
      {"write.cc:search_locked 1 load does not acquire", kUnderALock},
      {"write.cc:try_lock 1 load does not acquire", kHint},
      {"write.cc:try_lock 2 exchange does not acquire", kNothingToOrder},
      {"write.cc:try_lock 2 exchange does not release", kNothingToOrder},
      {"write.cc:try_lock 3 store is left out", kCarried},
      {"write.cc:try_lock 4 exchange does not release", kNothingToOrder},
      {"write.cc:try_publish 1 load does not acquire", kUnderALock},
      {"write.cc:try_publish 2 load does not acquire", kUnderALock},
      {"write.cc:try_publish 3 load does not acquire", kUnderALock},
      {"write.cc:walk_bucket 1 load does not acquire", kUnderALock},
      {"write.cc:walk_bucket 2 load does not acquire", kUnderALock},
      {"write.cc:walk_bucket 3 store does not release", kCarried},
  };
  return all;
}

}  // namespace petps::model
