// See rows.h.
#include "scheduler/rows.h"

namespace fc {

template <class F>
void RowTable::each_bits(F visit) {
  for (Bits& bits : ready_) visit(bits);
  for (Bits& bits : holding_) visit(bits);
  visit(busy_);
  visit(asking_);
}

Row& RowTable::add(std::unique_ptr<Row> row) {
  if (slots_.size() >= 64 && by_id_.size() * 2 <= slots_.size()) compact();
  row->slot = num_slots();
  slots_.push_back(std::move(row));
  each_bits([this](Bits& bits) { bits.grow(num_slots()); });
  Row& added = *slots_.back();
  by_id_[added.id] = &added;
  return added;
}

Row& RowTable::at(int64_t id) {
  const auto it = by_id_.find(id);
  if (it == by_id_.end()) throw UnknownRow(id);
  return *it->second;
}

void RowTable::erase(Row& row) {
  by_id_.erase(row.id);
  slots_[row.slot].reset();
}

void RowTable::clear() {
  slots_.clear();
  by_id_.clear();
  each_bits([](Bits& bits) { bits = {}; });
  for (int64_t& n : num_ready_) n = 0;
  num_running_ = 0;
}

void RowTable::compact() {
  std::vector<std::unique_ptr<Row>> kept;
  for (auto& row : slots_) {
    if (row) kept.push_back(std::move(row));
  }
  slots_ = std::move(kept);
  each_bits([this](Bits& bits) {
    Bits packed;
    packed.grow(num_slots());
    for (int32_t slot = 0; slot < num_slots(); ++slot) packed.put(slot, bits.test(slots_[slot]->slot));
    bits = std::move(packed);
  });
  for (int32_t slot = 0; slot < num_slots(); ++slot) slots_[slot]->slot = slot;
}

void RowTable::refresh(Row& row) {
  const bool running = row.state == kRunning;
  num_running_ += running - row.counted_running;
  row.counted_running = running;
  const int32_t ready = running && !row.asking && !row.busy ? row.model() : -1;
  if (ready != row.counted_ready) {
    if (row.counted_ready >= 0) {
      ready_[row.counted_ready].put(row.slot, false);
      --num_ready_[row.counted_ready];
    }
    if (ready >= 0) {
      ready_[ready].put(row.slot, true);
      ++num_ready_[ready];
    }
    row.counted_ready = ready;
  }
  busy_.put(row.slot, row.busy);
  asking_.put(row.slot, row.asking && running);
}

void RowTable::enter_plan(Row& row) {
  row.busy = true;
  busy_.put(row.slot, true);
  ready_[row.counted_ready].put(row.slot, false);
  --num_ready_[row.counted_ready];
  row.counted_ready = -1;
}

std::vector<int64_t> RowTable::asking() const {
  std::vector<int64_t> ids;
  for (int32_t w = 0; w < asking_.num_words(); ++w) {
    for (uint64_t word = asking_.word(w); word; word &= word - 1) {
      ids.push_back(slots_[w * 64 + std::countr_zero(word)]->id);
    }
  }
  return ids;
}

int32_t RowTable::next_ready(int32_t m, int32_t from, bool must_hold) const {
  const Bits &ready = ready_[m], &holding = holding_[m];
  uint64_t mask = ~uint64_t{0} << (from & 63);
  for (int32_t w = from >> 6; w < ready.num_words(); ++w, mask = ~uint64_t{0}) {
    const uint64_t word = ready.word(w) & mask & (must_hold ? holding.word(w) : ~uint64_t{0});
    if (word) return w * 64 + std::countr_zero(word);
  }
  return -1;
}

int32_t RowTable::youngest_idle_holder(int32_t m, int32_t upto) const {
  uint64_t mask = ~uint64_t{0} >> (63 - (upto & 63));
  for (int32_t w = upto >> 6; w >= 0; --w, mask = ~uint64_t{0}) {
    const uint64_t word = holding_[m].word(w) & ~busy_.word(w) & mask;
    if (word) return w * 64 + 63 - std::countl_zero(word);
  }
  return -1;
}

}  // namespace fc
