package trainerrank

import (
	_ "embed"
	"encoding/json"
	"slices"
	"sync"

	"github.com/trainerrank/engine/forward/prefixtree"
)

//go:embed tables.json
var tablesJSON []byte

// ownTables are the cost tables that come with the engine, as the acceptance harness wrote them: go run ./acceptance --phase cost-calibrate --json, "tables".
var ownTables = sync.OnceValue(func() (list []prefixtree.Table) {
	if err := json.Unmarshal(tablesJSON, &list); err != nil {
		panic("trainerrank: the embedded cost tables: " + err.Error()) // a test reads them
	}
	return list
})

// Tables are the cost tables that come with the engine, with the certificates of their fits. They are asked after those of [WithCostTables].
func Tables() []prefixtree.Table { return slices.Clone(ownTables()) }
