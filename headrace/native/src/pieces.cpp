// SentencePiece's byte-pair merging: of all neighbours whose union is a token, the two with the best
// score become that token first. No list of merges: unions are looked up by the hash of their text.
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace {

constexpr uint64_t kBase = 0x9E3779B97F4A7C15ull;  // odd: powers never vanish mod 2^64
constexpr int32_t kNone = -1;
constexpr char kSpace[] = "\xE2\x96\x81";  // what stands for a space in tokens
constexpr uint32_t kSpaceBytes = 3;

enum Role : uint8_t { kPlain = 0, kSpecial = 1, kUser = 2 };
enum Status : int32_t { kGood = 0, kCut, kNotText, kRepeated, kNotNumbers };

uint64_t hash_of(const char* text, uint32_t size) {
  uint64_t hash = 0;
  for (uint32_t i = 0; i < size; ++i) hash = hash * kBase + uint8_t(text[i]) + 1;
  return hash;
}

uint32_t character_bytes(uint8_t lead) {
  return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

// Whether it is UTF-8 as Python's strict decoder takes it.
bool is_text(const uint8_t* at, const uint8_t* end) {
  while (at < end) {
    uint8_t lead = *at;
    if (lead < 0x80) {
      ++at;
      continue;
    }
    uint32_t size = character_bytes(lead);
    if (lead < 0xC2 || lead > 0xF4 || end - at < size) return false;
    uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (at[1] < low || at[1] > high) return false;
    for (uint32_t i = 2; i < size; ++i)
      if ((at[i] & 0xC0) != 0x80) return false;
    at += size;
  }
  return true;
}

struct Symbol {
  int32_t before, after;  // neighbours, kNone at the ends
  int32_t id;             // kNone: it is part of another by now
};

// Two neighbours that could become one token.
struct Pair {
  float score;
  int32_t left, right, made;  // ids
  int32_t at;                 // the left symbol
};

// For a heap whose top is merged next: the best score, then the smallest ids, then the leftmost.
bool later(const Pair& a, const Pair& b) {
  if (a.score != b.score) return a.score < b.score;
  if (a.left != b.left) return a.left > b.left;
  if (a.right != b.right) return a.right > b.right;
  return a.at > b.at;
}

}  // namespace

// Immutable once it is made: any number of threads may encode.
class Pieces {
 public:
  Status read(const uint8_t* strings, int64_t size, int32_t count, const float* scores,
              const uint8_t* roles) {
    int64_t at = 0;
    text_.reserve(size - 8 * int64_t(count));
    starts_.reserve(count + 1);
    hashes_.reserve(count);
    starts_.push_back(0);
    for (int32_t id = 0; id < count; ++id) {
      uint64_t length;
      if (size - at < 8) return kCut;
      memcpy(&length, strings + at, 8);
      at += 8;
      if (length > uint64_t(size - at)) return kCut;
      const uint8_t* start = strings + at;
      if (!is_text(start, start + length)) return kNotText;
      text_.insert(text_.end(), start, start + length);
      starts_.push_back(uint32_t(text_.size()));
      hashes_.push_back(hash_of(reinterpret_cast<const char*>(start), uint32_t(length)));
      longest_ = std::max(longest_, uint32_t(length));
      at += int64_t(length);
      if (scores[id] != scores[id]) return kNotNumbers;
    }
    scores_.assign(scores, scores + count);
    roles_.assign(roles, roles + count);
    powers_.push_back(1);
    for (uint32_t i = 0; i < longest_; ++i) powers_.push_back(powers_.back() * kBase);
    return index() ? sort_added() : kRepeated;
  }

  void settle(int32_t unknown, bool prefix) {
    unknown_ = unknown;
    prefix_ = prefix;
    for (int byte = 0; byte < 256; ++byte) {
      constexpr char digits[] = "0123456789ABCDEF";
      const char name[] = {'<', '0', 'x', digits[byte >> 4], digits[byte & 15], '>'};
      bytes_[byte] = find(name, sizeof name);
    }
  }

  void encode(const char* text, int64_t size, bool blind, std::vector<int32_t>& out) const {
    int64_t start = 0, at = 0;
    while (at < size) {
      int32_t added = added_at(text + at, size - at);
      if (added == kNone) {
        ++at;
        continue;
      }
      int64_t end = at + length(added);
      if (!(blind && roles_[added] == kSpecial)) {
        merge(text + start, at - start, out);
        out.push_back(added);
        start = end;
      }
      at = end;
    }
    merge(text + start, size - start, out);
  }

 private:
  uint32_t length(int32_t id) const { return starts_[id + 1] - starts_[id]; }
  const char* text(int32_t id) const { return text_.data() + starts_[id]; }

  uint64_t slot_of(uint64_t hash) const {
    return ((hash ^ (hash >> 29)) * 0xBF58476D1CE4E5B9ull) >> shift_;
  }

  // The token that is one text, or two in a row.
  int32_t find(const char* one, uint32_t size) const {
    return find(hash_of(one, size), one, size, nullptr, 0);
  }

  int32_t find(uint64_t hash, const char* left, uint32_t left_size, const char* right,
               uint32_t right_size) const {
    for (uint64_t slot = slot_of(hash);; slot = (slot + 1) & mask_) {
      int32_t id = slots_[slot];
      if (id == kNone) return kNone;
      if (hashes_[id] == hash && length(id) == left_size + right_size &&
          memcmp(text(id), left, left_size) == 0 &&
          (right_size == 0 || memcmp(text(id) + left_size, right, right_size) == 0))
        return id;
    }
  }

  int32_t joined(int32_t left, int32_t right) const {
    uint32_t left_size = length(left), right_size = length(right);
    if (left_size + right_size > longest_) return kNone;
    uint64_t hash = hashes_[left] * powers_[right_size] + hashes_[right];
    return find(hash, text(left), left_size, text(right), right_size);
  }

  // False if a text occurs twice.
  bool index() {
    uint64_t room = 16;
    int bits = 4;
    while (room < 2 * hashes_.size()) room *= 2, ++bits;
    slots_.assign(room, kNone);
    mask_ = room - 1;
    shift_ = 64 - bits;
    for (int32_t id = 0; id < int32_t(hashes_.size()); ++id) {
      if (find(hashes_[id], text(id), length(id), nullptr, 0) != kNone) return false;
      uint64_t slot = slot_of(hashes_[id]);
      while (slots_[slot] != kNone) slot = (slot + 1) & mask_;
      slots_[slot] = id;
    }
    return true;
  }

  // Tokens that are found in a text before anything is merged, in the order of their bytes.
  Status sort_added() {
    for (int32_t id = 0; id < int32_t(roles_.size()); ++id)
      if (roles_[id] != kPlain && length(id) > 0) added_.push_back(id);
    std::sort(added_.begin(), added_.end(), [this](int32_t a, int32_t b) {
      int order = memcmp(text(a), text(b), std::min(length(a), length(b)));
      return order != 0 ? order < 0 : length(a) < length(b);
    });
    size_t at = 0;
    for (int byte = 0; byte < 256; ++byte) {
      firsts_[byte] = uint32_t(at);
      while (at < added_.size() && uint8_t(*text(added_[at])) == byte) ++at;
    }
    firsts_[256] = uint32_t(at);
    return kGood;
  }

  // The longest added token at the start of a text: all that begin as it does are a range of `added_`.
  int32_t added_at(const char* at, int64_t size) const {
    uint8_t first = uint8_t(*at);
    auto low = added_.begin() + firsts_[first], high = added_.begin() + firsts_[first + 1];
    int32_t found = kNone;
    for (uint32_t depth = 1; low != high; ++depth) {
      if (length(*low) == depth) found = *low++;
      if (depth == size) break;
      uint8_t next = uint8_t(at[depth]);
      low = std::lower_bound(low, high, next, [this, depth](int32_t id, uint8_t byte) {
        return uint8_t(text(id)[depth]) < byte;
      });
      high = std::upper_bound(low, high, next, [this, depth](uint8_t byte, int32_t id) {
        return byte < uint8_t(text(id)[depth]);
      });
    }
    return found;
  }

  void merge(const char* at, int64_t size, std::vector<int32_t>& out) const {
    if (size == 0) return;
    std::vector<int32_t> ids;
    ids.reserve(size + 1);
    bool unknown = false;  // one waits to be written: neighbours become one
    if (prefix_) spell(kSpace, kSpaceBytes, ids, unknown);
    for (const char* end = at + size; at < end;) {
      uint32_t bytes = uint32_t(std::min<int64_t>(character_bytes(uint8_t(*at)), end - at));
      if (*at == ' ')
        spell(kSpace, kSpaceBytes, ids, unknown);
      else
        spell(at, bytes, ids, unknown);
      at += bytes;
    }
    if (unknown) ids.push_back(unknown_);
    join(ids, out);
  }

  // One character: its token, else those of its bytes, else the unknown one.
  void spell(const char* character, uint32_t size, std::vector<int32_t>& ids, bool& unknown) const {
    int32_t id = find(character, size);
    if (id != kNone) {
      if (unknown) ids.push_back(unknown_);
      unknown = false;
      ids.push_back(id);
      return;
    }
    for (uint32_t i = 0; i < size; ++i)
      if (bytes_[uint8_t(character[i])] == kNone) {
        unknown = true;
        return;
      }
    // As `tokenizers` has it: an unknown token that waits comes behind such bytes.
    for (uint32_t i = 0; i < size; ++i) ids.push_back(bytes_[uint8_t(character[i])]);
  }

  void join(const std::vector<int32_t>& ids, std::vector<int32_t>& out) const {
    std::vector<Symbol> symbols(ids.size());
    std::vector<Pair> heap;
    auto push = [&](int32_t left, int32_t right) {
      int32_t made = joined(symbols[left].id, symbols[right].id);
      if (made == kNone) return false;
      heap.push_back({scores_[made], symbols[left].id, symbols[right].id, made, left});
      return true;
    };
    int32_t count = int32_t(ids.size());
    for (int32_t i = 0; i < count; ++i) {
      symbols[i] = {i - 1, i + 1 < count ? i + 1 : kNone, ids[i]};
      if (i > 0) push(i - 1, i);
    }
    std::make_heap(heap.begin(), heap.end(), later);
    while (!heap.empty()) {
      std::pop_heap(heap.begin(), heap.end(), later);
      Pair pair = heap.back();
      heap.pop_back();
      Symbol& left = symbols[pair.at];
      if (left.id != pair.left || left.after == kNone || symbols[left.after].id != pair.right)
        continue;  // one of the two has become part of something else
      Symbol& right = symbols[left.after];
      left.id = pair.made;
      left.after = right.after;
      right.id = kNone;
      if (left.after != kNone) symbols[left.after].before = pair.at;
      if (left.before != kNone && push(left.before, pair.at))
        std::push_heap(heap.begin(), heap.end(), later);
      if (left.after != kNone && push(pair.at, left.after))
        std::push_heap(heap.begin(), heap.end(), later);
    }
    for (int32_t i = 0; i != kNone && i < count; i = symbols[i].after) out.push_back(symbols[i].id);
  }

  std::vector<char> text_;         // of all tokens, one after another
  std::vector<uint32_t> starts_;   // [id], and the end
  std::vector<uint64_t> hashes_;   // [id]
  std::vector<float> scores_;      // [id]
  std::vector<uint8_t> roles_;     // [id]
  std::vector<uint64_t> powers_;   // kBase^i
  std::vector<int32_t> slots_;     // an open hash table of ids
  std::vector<int32_t> added_;
  uint32_t firsts_[257] = {};      // where those with each first byte begin in `added_`
  int32_t bytes_[256];             // the token of each byte
  uint64_t mask_ = 0;
  int shift_ = 0;
  uint32_t longest_ = 0;
  int32_t unknown_ = 0;
  bool prefix_ = false;
};

extern "C" {

// A tokenizer of `count` tokens, each with its length in 8 bytes before it as in a GGUF file; null, and
// the reason in `status`, if they are none that can be looked up by their bytes.
Pieces* hr_pieces_new(const uint8_t* strings, int64_t size, int32_t count, const float* scores,
                      const uint8_t* roles, int32_t unknown, int32_t prefix, int32_t* status) {
  auto made = std::make_unique<Pieces>();
  *status = made->read(strings, size, count, scores, roles);
  if (*status != kGood) return nullptr;
  made->settle(unknown, prefix != 0);
  return made.release();
}

void hr_pieces_free(Pieces* pieces) { delete pieces; }

// The ids of a text in UTF-8, to be read by `hr_ids_of` and freed by `hr_ids_free`. blind: special
// tokens in it are spelled out.
std::vector<int32_t>* hr_pieces_encode(const Pieces* pieces, const char* text, int64_t size,
                                       int32_t blind, int64_t* count) {
  auto ids = std::make_unique<std::vector<int32_t>>();
  pieces->encode(text, size, blind != 0, *ids);
  *count = int64_t(ids->size());
  return ids.release();
}

const int32_t* hr_ids_of(const std::vector<int32_t>* ids) { return ids->data(); }

void hr_ids_free(std::vector<int32_t>* ids) { delete ids; }
}
