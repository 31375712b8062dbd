// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace paceline::balance {

/// One JSON value, as far as a ledger needs it.
///
/// A small strict reader of our own (RFC 8259) instead of a library: a ledger is one object per line of a fixed form,
/// numbers must come back bit for bit, and errors must name what is missing where. The usual library's wheel ships
/// neither a CMake package nor a directory on any prefix, so finding it in both a distribution and an isolated build
/// was the larger and more brittle part. Accessors throw InvalidArgument saying what was expected and what is there.
class Json {
 public:
  enum class Kind : std::uint8_t { null, boolean, number, string, array, object };

  /// @throws InvalidArgument with the column of the first character that is wrong.
  [[nodiscard]] static Json parse(std::string_view text);

  [[nodiscard]] Kind kind() const { return kind_; }
  [[nodiscard]] bool is_null() const { return kind_ == Kind::null; }
  [[nodiscard]] bool boolean() const;
  [[nodiscard]] double number() const;
  [[nodiscard]] std::int64_t integer() const;
  [[nodiscard]] const std::string& string() const;
  [[nodiscard]] const std::vector<Json>& array() const;
  [[nodiscard]] bool has(std::string_view name) const;
  /// The member of an object.
  [[nodiscard]] const Json& operator[](std::string_view name) const;

 private:
  friend class JsonParser;
  void expect(Kind kind) const;

  Kind kind_ = Kind::null;
  bool boolean_ = false;
  std::string text_;  // of a string, or of a number as written
  std::vector<Json> items_;
  std::vector<std::string> names_;  // of an object's items
};

/// `text` as a JSON string, quotes included.
[[nodiscard]] std::string json_quoted(std::string_view text);

}  // namespace paceline::balance
