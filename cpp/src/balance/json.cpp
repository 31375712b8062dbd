// SPDX-License-Identifier: Apache-2.0
#include "balance/json.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include <paceline/error.hpp>

namespace paceline::balance {
namespace {

constexpr int kDeepest = 16;  // a ledger nests 5 deep; more is somebody's attack on the stack
constexpr std::array<const char*, 6> kNames{"null", "a boolean", "a number", "a string", "an array", "an object"};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

class JsonParser {
 public:
  explicit JsonParser(std::string_view text) : text_(text) {}

  Json document() {
    Json value = parse_value(0);
    skip_space();
    if (at_ != text_.size()) fail("nothing may follow the value");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& message) const {
    throw InvalidArgument(fmt::format("column {}: {}", at_ + 1, message));
  }

  [[nodiscard]] char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void skip_space() {
    while (peek() == ' ' || peek() == '\t' || peek() == '\r' || peek() == '\n') ++at_;
  }

  void take(char c) {
    if (peek() != c) fail(fmt::format("'{}' expected", c));
    ++at_;
  }

  void take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) fail("a value expected");
    at_ += word.size();
  }

  Json parse_value(int depth) {
    if (depth > kDeepest) fail("nested too deeply");
    skip_space();
    Json value;
    switch (peek()) {
      case '{':
        parse_object(value, depth);
        break;
      case '[':
        parse_array(value, depth);
        break;
      case '"':
        value.kind_ = Json::Kind::string;
        value.text_ = parse_string();
        break;
      case 't':
        take_word("true");
        value.kind_ = Json::Kind::boolean;
        value.boolean_ = true;
        break;
      case 'f':
        take_word("false");
        value.kind_ = Json::Kind::boolean;
        break;
      case 'n':
        take_word("null");
        break;
      default:
        value.kind_ = Json::Kind::number;
        value.text_ = parse_number();
    }
    return value;
  }

  void parse_object(Json& value, int depth) {
    value.kind_ = Json::Kind::object;
    take('{');
    skip_space();
    if (peek() == '}') return take('}');
    for (;;) {
      skip_space();
      std::string name = parse_string();
      if (std::find(value.names_.begin(), value.names_.end(), name) != value.names_.end()) {
        fail(fmt::format("\"{}\" stands there twice", name));
      }
      skip_space();
      take(':');
      value.items_.push_back(parse_value(depth + 1));
      value.names_.push_back(std::move(name));
      skip_space();
      if (peek() == '}') return take('}');
      take(',');
    }
  }

  void parse_array(Json& value, int depth) {
    value.kind_ = Json::Kind::array;
    take('[');
    skip_space();
    if (peek() == ']') return take(']');
    for (;;) {
      value.items_.push_back(parse_value(depth + 1));
      skip_space();
      if (peek() == ']') return take(']');
      take(',');
    }
  }

  std::string parse_string() {
    take('"');
    std::string out;
    while (peek() != '"') {
      if (at_ >= text_.size()) fail("the string does not end");
      const char c = text_[at_++];
      if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a string");
      out += c == '\\' ? parse_escape() : std::string(1, c);
    }
    take('"');
    return out;
  }

  std::string parse_escape() {
    const char c = peek();
    ++at_;
    switch (c) {
      case '"':
      case '\\':
      case '/':
        return std::string(1, c);
      case 'n':
        return "\n";
      case 't':
        return "\t";
      case 'r':
        return "\r";
      case 'b':
        return "\b";
      case 'f':
        return "\f";
      case 'u':
        break;
      default:
        fail("an unknown escape");
    }
    unsigned code = 0;
    const char* first = text_.data() + at_;
    const std::size_t length = std::min<std::size_t>(4, text_.size() - at_);
    const auto [end, error] = std::from_chars(first, first + length, code, 16);
    // We write \u only for control characters, so that is all that is read.
    if (error != std::errc{} || end != first + 4 || code >= 0x80)
      fail("\\u needs four digits of an ASCII character here");
    at_ += 4;
    return std::string(1, static_cast<char>(code));
  }

  std::string parse_number() {
    const std::size_t start = at_;
    const auto digits = [&] {
      const std::size_t before = at_;
      while (is_digit(peek())) ++at_;
      if (at_ == before) fail("a value expected");
    };
    if (peek() == '-') ++at_;
    if (peek() == '0' && at_ + 1 < text_.size() && is_digit(text_[at_ + 1])) fail("a number has no leading zero");
    digits();
    if (peek() == '.') {
      ++at_;
      digits();
    }
    if (peek() == 'e' || peek() == 'E') {
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      digits();
    }
    return std::string(text_.substr(start, at_ - start));
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

Json Json::parse(std::string_view text) { return JsonParser(text).document(); }

void Json::expect(Kind kind) const {
  if (kind_ == kind) return;
  throw InvalidArgument(fmt::format("{} expected, {} is there", kNames[static_cast<std::size_t>(kind)],
                                    kNames[static_cast<std::size_t>(kind_)]));
}

bool Json::boolean() const {
  expect(Kind::boolean);
  return boolean_;
}

double Json::number() const {
  expect(Kind::number);
  double value = 0.0;
  const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), value);
  if (error != std::errc{} || !std::isfinite(value)) throw InvalidArgument(fmt::format("{} is out of range", text_));
  return value;
}

std::int64_t Json::integer() const {
  expect(Kind::number);
  std::int64_t value = 0;
  const char* last = text_.data() + text_.size();
  const auto [end, error] = std::from_chars(text_.data(), last, value);
  if (error != std::errc{} || end != last)
    throw InvalidArgument(fmt::format("{} is not a whole number in range", text_));
  return value;
}

const std::string& Json::string() const {
  expect(Kind::string);
  return text_;
}

const std::vector<Json>& Json::array() const {
  expect(Kind::array);
  return items_;
}

bool Json::has(std::string_view name) const {
  return kind_ == Kind::object && std::find(names_.begin(), names_.end(), name) != names_.end();
}

const Json& Json::operator[](std::string_view name) const {
  expect(Kind::object);
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found == names_.end()) throw InvalidArgument(fmt::format("\"{}\" is missing", name));
  return items_[static_cast<std::size_t>(found - names_.begin())];
}

std::string json_quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace paceline::balance
