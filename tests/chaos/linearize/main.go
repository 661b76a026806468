// Program linearize says whether the histories of keys are linearizable, with Porcupine.
//
// Its standard input has one operation a line, in any order:
//
//	{"client": 1, "key": 7, "push": true, "value": 12, "call": 100, "return": 200}
//
// A key is a register that begins with value 0 (no row). An operation without "return" is a push of
// which nobody knows whether, or when, it was applied. Its standard output has one line for each key
// that fails, with the operations in the order of their calls, and last a line with the counts.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"sort"
	"time"

	"github.com/anishathalye/porcupine"
)

type operation struct {
	Client int    `json:"client"`
	Key    uint64 `json:"key"`
	Push   bool   `json:"push"`
	Value  int64  `json:"value"`
	Call   int64  `json:"call"`
	Return *int64 `json:"return,omitempty"`
}

type failure struct {
	Key     uint64      `json:"key"`
	Verdict string      `json:"verdict"`
	History []operation `json:"history"`
}

type summary struct {
	Keys       int `json:"keys"`
	Operations int `json:"operations"`
	Failed     int `json:"failed"`
}

var register = porcupine.Model{
	Init: func() interface{} { return int64(0) },
	Step: func(state, input, output interface{}) (bool, interface{}) {
		if input.(operation).Push {
			return true, input.(operation).Value
		}
		return output.(int64) == state.(int64), state
	},
}

func check(history []operation, limit time.Duration) porcupine.CheckResult {
	var operations []porcupine.Operation
	for _, op := range history {
		end := int64(math.MaxInt64)
		if op.Return != nil {
			end = *op.Return
		}
		operations = append(operations, porcupine.Operation{
			ClientId: op.Client, Input: op, Call: op.Call, Output: op.Value, Return: end,
		})
	}
	return porcupine.CheckOperationsTimeout(register, operations, limit)
}

func main() {
	limit := flag.Duration("limit", 30*time.Second, "for the search of one key")
	flag.Parse()
	histories := map[uint64][]operation{}
	input := bufio.NewScanner(os.Stdin)
	input.Buffer(nil, 1<<20)
	var total summary
	for input.Scan() {
		var op operation
		if err := json.Unmarshal(input.Bytes(), &op); err != nil {
			fmt.Fprintf(os.Stderr, "linearize: %q is no operation: %v\n", input.Text(), err)
			os.Exit(2)
		}
		histories[op.Key] = append(histories[op.Key], op)
		total.Operations++
	}
	if err := input.Err(); err != nil {
		fmt.Fprintln(os.Stderr, "linearize:", err)
		os.Exit(2)
	}
	keys := make([]uint64, 0, len(histories))
	for key := range histories {
		keys = append(keys, key)
	}
	sort.Slice(keys, func(i, j int) bool { return keys[i] < keys[j] })
	output := json.NewEncoder(os.Stdout)
	for _, key := range keys {
		history := histories[key]
		sort.SliceStable(history, func(i, j int) bool { return history[i].Call < history[j].Call })
		total.Keys++
		if verdict := check(history, *limit); verdict != porcupine.Ok {
			total.Failed++
			_ = output.Encode(failure{key, string(verdict), history})
		}
	}
	_ = output.Encode(total)
}
