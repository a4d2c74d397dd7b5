// A model's KV blocks: reference counts, the free queue, and the content cache that prompts share through.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

namespace fc {

using Tokens = std::span<const int32_t>;

// Leading ids of some row, as a path of blocks from the root; only the last block may be partial. Equal prefixes are
// one object (parents and tokens are compared, not hashes alone), which lives while anything uses it.
struct Prefix {
  Prefix* parent;
  uint64_t hash;                // chained over the blocks
  std::vector<int32_t> tokens;  // of the last block
  int32_t block = -1;           // the cache's entry: a block with this content, or -1
  int32_t uses = 0;             // by children, by rows that stand here, by the entry
  Prefix* next = nullptr;       // the next entry of the same block
};

// A freed block that is published keeps its content and joins the queue's end; an unpublished one goes to its front.
// An entry is valid until its block is taken from the queue or written below the entry's length.
class BlockPool {
 public:
  BlockPool(int32_t num_blocks, int32_t block_size);
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;

  int32_t num_blocks() const { return static_cast<int32_t>(ref_.size()); }
  int32_t num_free() const { return num_free_; }
  int32_t ref(int32_t block) const { return ref_[block]; }
  const std::vector<int32_t>& refs() const { return ref_; }

  int32_t allocate();
  void share(int32_t block);
  void release(int32_t block);

  Prefix* root() { return root_; }
  Prefix* find(Prefix* parent, Tokens tokens) const;  // null if nothing uses that prefix
  // Enters `block` as the content of `parent` + `tokens` unless there is an entry; returns that prefix.
  Prefix* publish(Prefix* parent, Tokens tokens, int32_t block);
  void unpublish(int32_t block, int32_t offset);  // drops the entries that cover more than its first `offset` slots
  void clear();                                   // drops every entry
  static void hold(Prefix* prefix) { ++prefix->uses; }
  void drop(Prefix* prefix);

 private:
  struct Key {
    Prefix* parent;
    uint64_t hash;
    Tokens tokens;
  };
  struct Hash {
    using is_transparent = void;
    size_t operator()(const Prefix* p) const { return p->hash; }
    size_t operator()(const Key& k) const { return k.hash; }
  };
  struct Equal {
    using is_transparent = void;
    bool operator()(const Prefix* a, const Prefix* b) const { return a == b; }
    bool operator()(const Key& k, const Prefix* p) const;
    bool operator()(const Prefix* p, const Key& k) const { return (*this)(k, p); }
  };

  void unlink(int32_t block);
  void link_between(int32_t before, int32_t block, int32_t after);

  std::vector<int32_t> ref_;
  std::vector<int32_t> previous_, next_;  // the free queue, a ring through the sentinel num_blocks
  std::vector<Prefix*> published_;        // per block, the first of its entries
  int32_t num_free_;
  Prefix* root_;
  std::unordered_set<Prefix*, Hash, Equal> prefixes_;  // all but the root
};

}  // namespace fc
