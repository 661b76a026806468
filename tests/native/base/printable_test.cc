#include "base/printable.h"

#include <gtest/gtest.h>

namespace petps::base {
namespace {

TEST(Printable, KeepsWhatIsPrintable) {
  for (const char* text : {"", "plain ~", "M\xc3\xbcller", "\xe2\x82\xac", "\xf0\x9f\x8e\x89",
                           "\xc2\xa0", "\xf4\x8f\xbf\xbf"})
    EXPECT_EQ(printable(text), text);
}

TEST(Printable, ReplacesControlCharactersAndBytesThatAreNoUtf8) {
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a?b");
  EXPECT_EQ(printable("a\x1b[2J\r\n\x7f"), "a?[2J???");
  EXPECT_EQ(printable("\xc2\x9b"), "?");                  // CSI as one character of C1
  EXPECT_EQ(printable("\xff\xfe|\x80"), "??|?");          // never in UTF-8; no first byte
  EXPECT_EQ(printable("\xc0\xaf\xe0\x80\xaf"), "?????");  // too long
  EXPECT_EQ(printable("\xed\xa0\x80"), "???");            // a surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "????");       // above U+10FFFF
  EXPECT_EQ(printable("\xe2\x82"), "??");                 // cut
  EXPECT_EQ(printable("\xe2\x82 \xe2\x82\xac"), "?? \xe2\x82\xac");
}

TEST(Printable, ReplacesCharactersThatNoEyeSees) {
  EXPECT_EQ(printable("a\xe2\x80\xae"
                      "b"),
            "a?b");                                        // U+202E: right to left from here
  EXPECT_EQ(printable("\xe2\x80\xa8\xe2\x80\xa9"), "??");  // U+2028, U+2029: they end a line
  EXPECT_EQ(printable("\xc2\xad\xef\xbb\xbf"), "??");      // U+00AD, U+FEFF
  EXPECT_EQ(printable("\xf3\xa0\x81\xbf"), "?");           // U+E007F, the last
  EXPECT_EQ(printable("\xe2\x80\xa7\xe2\x80\xaf"), "\xe2\x80\xa7\xe2\x80\xaf");  // beside them
}

}  // namespace
}  // namespace petps::base
