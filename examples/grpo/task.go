package main

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"strings"
)

// The model reads one token a character.
const (
	begin = 1  // before every sequence
	end   = 19 // ";", after every answer
)

var characters = map[byte]int32{'0': 3, '1': 4, '2': 5, '3': 6, '4': 7, '5': 8, '6': 9, '7': 10, '8': 11, '9': 12, '+': 13, '-': 14, '*': 15, '=': 16, ';': end}

// encode turns text into tokens.
func encode(text string) ([]int32, error) {
	tokens := make([]int32, len(text))
	for i := range tokens {
		id, ok := characters[text[i]]
		if !ok {
			return nil, fmt.Errorf("encode %q: no token for %q", text, text[i])
		}
		tokens[i] = id
	}
	return tokens, nil
}

// prompt is the solved sums that precede every question.
func prompt(folder fs.FS) ([]int32, error) {
	text, err := fs.ReadFile(folder, "prompt.txt")
	if err != nil {
		return nil, err
	}
	tokens, err := encode(strings.TrimSpace(string(text)))
	return append([]int32{begin}, tokens...), err
}

// task is a question with its right answer, in tokens.
type task struct {
	question, answer []int32
	value            int
}

// number reads an answer.
func number(tokens []int32) (n int, ok bool) {
	sign := 1
	if len(tokens) > 0 && tokens[0] == characters['-'] {
		sign, tokens = -1, tokens[1:]
	}
	if len(tokens) < 2 || tokens[len(tokens)-1] != end {
		return 0, false
	}
	for _, t := range tokens[:len(tokens)-1] {
		if t < characters['0'] || t > characters['9'] {
			return 0, false
		}
		n = 10*n + int(t-characters['0'])
	}
	return sign * n, true
}

// terms is what the terms of a sum are below.
const terms = 20

// tasks draws sums of three terms.
type tasks struct{ *rand.Rand }

func newTasks(seed uint64) tasks { return tasks{rand.New(rand.NewPCG(seed, 3))} }

func (t tasks) next() task {
	sign := func() (string, int) {
		if t.IntN(2) == 0 {
			return "+", 1
		}
		return "-", -1
	}
	a, b, c := t.IntN(terms), t.IntN(terms), t.IntN(terms)
	s1, f1 := sign()
	s2, f2 := sign()
	question, err := encode(fmt.Sprintf("%d%s%d%s%d=", a, s1, b, s2, c))
	if err != nil {
		panic(err) // of digits and signs
	}
	value := a + f1*b + f2*c
	answer, err := encode(fmt.Sprintf("%d;", value))
	if err != nil {
		panic(err)
	}
	return task{question, answer, value}
}
