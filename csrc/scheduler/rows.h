// The rows in order of age, and the sets of rows that planning walks, as bits over that order.
#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "scheduler/row.h"

namespace fc {

struct UnknownRow : std::out_of_range {
  explicit UnknownRow(int64_t id) : std::out_of_range("unknown row"), id(id) {}
  int64_t id;
};

class Bits {
 public:
  void grow(int32_t slots) { words_.resize((static_cast<size_t>(slots) + 63) / 64); }
  void put(int32_t slot, bool on) {
    const uint64_t bit = uint64_t{1} << (slot & 63);
    on ? words_[slot >> 6] |= bit : words_[slot >> 6] &= ~bit;
  }
  bool test(int32_t slot) const { return words_[slot >> 6] >> (slot & 63) & 1; }
  int32_t num_words() const { return static_cast<int32_t>(words_.size()); }
  uint64_t word(int32_t w) const { return words_[w]; }

 private:
  std::vector<uint64_t> words_;
};

class RowTable {
 public:
  explicit RowTable(int32_t num_models) : ready_(num_models), holding_(num_models), num_ready_(num_models) {}

  Row& add(std::unique_ptr<Row> row);  // the youngest; sets its slot
  Row& at(int64_t id);                 // throws UnknownRow
  Row& operator[](int32_t slot) { return *slots_[slot]; }
  void erase(Row& row);
  void clear();
  template <class F>
  void each(F visit) {
    for (auto& row : slots_) {
      if (row) visit(*row);
    }
  }

  // To be called after a row's state, author, asking or busy changed, or its table began or ceased to be empty.
  void refresh(Row& row);
  void enter_plan(Row& row);  // a ready row becomes busy
  void refresh_holding(const Row& row, int32_t m) { holding_[m].put(row.slot, !row.held[m].table.empty()); }

  int64_t num_running() const { return num_running_; }
  int64_t num_ready(int32_t m) const { return num_ready_[m]; }
  std::vector<int64_t> asking() const;

  // Slots, or -1. A row is ready for m if it runs, is not in a plan, and its author speaks through m.
  int32_t next_ready(int32_t m, int32_t from, bool must_hold) const;
  int32_t youngest_idle_holder(int32_t m, int32_t upto) const;
  int32_t num_slots() const { return static_cast<int32_t>(slots_.size()); }

  // Counts the holders older than a slot; slots must be asked for in rising order, and settle before they are passed.
  class OlderHolders {
   public:
    explicit OlderHolders(const Bits& holding) : holding_(holding) {}
    int32_t before(int32_t slot) {
      for (; word_ < slot >> 6; ++word_) count_ += std::popcount(holding_.word(word_));
      return count_ + std::popcount(holding_.word(word_) & ((uint64_t{1} << (slot & 63)) - 1));
    }

   private:
    const Bits& holding_;
    int32_t word_ = 0, count_ = 0;
  };
  OlderHolders older_holders(int32_t m) const { return OlderHolders(holding_[m]); }

 private:
  void compact();
  template <class F>
  void each_bits(F visit);

  std::vector<std::unique_ptr<Row>> slots_;  // by age; null where a row was erased
  std::unordered_map<int64_t, Row*> by_id_;
  std::vector<Bits> ready_, holding_;  // per model
  Bits busy_, asking_;
  std::vector<int64_t> num_ready_;
  int64_t num_running_ = 0;
};

}  // namespace fc
