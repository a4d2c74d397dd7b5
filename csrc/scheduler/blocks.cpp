// See blocks.h.
#include "scheduler/blocks.h"

#include <algorithm>
#include <cassert>

namespace fc {

namespace {

// The finaliser of splitmix64 over each token, chained from the parent's hash.
uint64_t chain(uint64_t hash, Tokens tokens) {
  for (int32_t token : tokens) {
    hash = (hash ^ static_cast<uint32_t>(token)) + 0x9E3779B97F4A7C15u;
    hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9u;
    hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EBu;
    hash ^= hash >> 31;
  }
  return hash;
}

}  // namespace

bool BlockPool::Equal::operator()(const Key& k, const Prefix* p) const {
  return p->parent == k.parent && std::equal(k.tokens.begin(), k.tokens.end(), p->tokens.begin(), p->tokens.end());
}

BlockPool::BlockPool(int32_t num_blocks, int32_t block_size)
    : ref_(num_blocks),
      previous_(num_blocks + 1),
      next_(num_blocks + 1),
      published_(num_blocks),
      num_free_(num_blocks) {
  for (int32_t i = 0; i <= num_blocks; ++i) {
    next_[i] = i == num_blocks ? 0 : i + 1;
    previous_[i] = i == 0 ? num_blocks : i - 1;
  }
  root_ = new Prefix{nullptr, static_cast<uint64_t>(block_size), {}};
}

BlockPool::~BlockPool() {
  for (Prefix* p : prefixes_) delete p;
  delete root_;
}

void BlockPool::unlink(int32_t block) {
  next_[previous_[block]] = next_[block];
  previous_[next_[block]] = previous_[block];
  --num_free_;
}

void BlockPool::link_between(int32_t before, int32_t block, int32_t after) {
  previous_[block] = before, next_[block] = after;
  next_[before] = block, previous_[after] = block;
  ++num_free_;
}

int32_t BlockPool::allocate() {
  assert(num_free_ > 0);
  const int32_t block = next_[num_blocks()];
  unlink(block);
  unpublish(block, 0);
  ref_[block] = 1;
  return block;
}

void BlockPool::share(int32_t block) {
  if (ref_[block]++ == 0) unlink(block);
}

void BlockPool::release(int32_t block) {
  assert(ref_[block] > 0 && "double free");
  if (--ref_[block] > 0) return;
  const int32_t ring = num_blocks();
  published_[block] ? link_between(previous_[ring], block, ring) : link_between(ring, block, next_[ring]);
}

Prefix* BlockPool::find(Prefix* parent, Tokens tokens) const {
  const auto it = prefixes_.find(Key{parent, chain(parent->hash, tokens), tokens});
  return it == prefixes_.end() ? nullptr : *it;
}

Prefix* BlockPool::publish(Prefix* parent, Tokens tokens, int32_t block) {
  Prefix* prefix = find(parent, tokens);
  if (!prefix) {
    prefix = new Prefix{parent, chain(parent->hash, tokens), {tokens.begin(), tokens.end()}};
    prefixes_.insert(prefix);
    hold(parent);
  }
  if (prefix->block < 0) {
    prefix->block = block;
    hold(prefix);
    prefix->next = published_[block];
    published_[block] = prefix;
  }
  return prefix;
}

void BlockPool::unpublish(int32_t block, int32_t offset) {
  Prefix** link = &published_[block];
  while (Prefix* prefix = *link) {
    if (static_cast<int32_t>(prefix->tokens.size()) > offset) {
      *link = prefix->next;
      prefix->block = -1;
      drop(prefix);
    } else {
      link = &prefix->next;
    }
  }
}

void BlockPool::clear() {
  for (int32_t block = 0; block < num_blocks(); ++block) unpublish(block, 0);
}

void BlockPool::drop(Prefix* prefix) {
  while (--prefix->uses == 0 && prefix != root_) {
    Prefix* parent = prefix->parent;
    prefixes_.erase(prefix);
    delete prefix;
    prefix = parent;
  }
}

}  // namespace fc
