// Package strictjson reads JSON without forgiving anything.
//
// encoding/json is made to be lenient with what a program meets: it takes the last of two equal keys, matches keys
// without regard to case, turns broken text into U+FFFD, loses integers above 2^53 when it decodes into an any, and has
// no say in how deep a text nests. Weights files, indexes, configurations and request lines come from strangers, and
// two readers that disagree about one text are how wrong weights are loaded. So here:
//
//   - the text must be UTF-8, without a byte order mark;
//   - two keys of one object that are equal after unescaping are an error, and keys are compared byte by byte;
//   - a \u escape that is half of a surrogate pair is an error, as is a control character inside a string;
//   - nothing but white space may follow the value;
//   - nesting deeper than the caller allows is an error;
//   - numbers keep their text; an integer is exact or refused: see [Value.Int64].
//
// There are two ways in. [Parse] builds a tree of [Value], for texts of moderate size such as config.json. A [Scanner]
// walks the text and builds nothing, for texts of a hundred megabytes such as a safetensors header.
//
// Every error is an [*Error] with the byte offset, line and column where it happened. [Value.Errorf] makes such an error
// for what only the caller can judge (a missing key, a number out of range).
//
// Caveats: a [Value] keeps the whole text alive. A value that [Scanner.Skip] passes over is checked as JSON but not for
// duplicate keys, because that would need memory in proportion to it.
package strictjson
