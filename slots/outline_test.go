package slots

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/forward"
)

// What an outline says beforehand is what the slot then is, and to make it took nothing of the device.
func TestAnOutlineIsWhatTheSlotBecomes(t *testing.T) {
	ctx := context.Background()
	saved := filepath.Join(t.TempDir(), "saved")
	must(t, trained(t, Options{}).Save(ctx, "x", saved))
	type folder struct {
		dir     string
		modules []forward.Module
	}
	folders := []folder{{saved, tiny}, {"testdata/golden/adapter", tiny}}
	for _, name := range fixtures {
		folders = append(folders, folder{"testdata/adapters/" + name, twelve})
	}
	for _, f := range folders {
		for _, o := range []LoadOptions{{IgnoreDropout: true}, {Inference: true}} {
			s := newSet(t, f.modules, 1<<26, Options{})
			out, err := s.Outline("x", f.dir, o)
			must(t, err)
			if in := s.dev.Stats(); in.PeakAllocated > 0 || len(s.Names()) > 0 {
				t.Errorf("%s: the outline takes %v", f.dir, in)
			}
			must(t, s.Load(ctx, "x", f.dir, o))
			info, err := s.Info("x")
			must(t, err)
			if d := cmp.Diff(info, out.Info); d != "" || out.Saved != (f.dir == saved) {
				t.Errorf("%s, %+v: saved here: %t (-slot +outline)\n%s", f.dir, o, out.Saved, d)
			}
			a, err := s.Adapter("x")
			must(t, err)
			if d := cmp.Diff(a.LoRA, out.Adapter.LoRA); d != "" || a.Bytes != out.Adapter.Bytes || a.Name != out.Adapter.Name || out.Adapter.Params.Bytes() > 0 {
				t.Errorf("%s: the adapter (-slot +outline)\n%s", f.dir, d)
			}
			alone, err := Describe(f.dir, o)
			must(t, err)
			slices.Sort(info.Modules)
			slices.Sort(alone.Modules)
			alone.Name = "x"
			// Vectors are padded tensor by tensor, so their order does not matter.
			if d := cmp.Diff(info, alone.Info); d != "" {
				t.Errorf("%s, described without its model (-slot +outline)\n%s", f.dir, d)
			}
		}
	}
	s := newSet(t, tiny, 1<<26, Options{BaseModel: "base"})
	for name, c := range configs {
		out, err := s.OutlineNew(name, c)
		must(t, err)
		must(t, s.Create(ctx, name, c))
		info, err := s.Info(name)
		must(t, err)
		if d := cmp.Diff(info, out.Info); d != "" {
			t.Errorf("%s (-slot +outline)\n%s", name, d)
		}
	}
}

func TestOutlinesOfWhatIsNoAdapter(t *testing.T) {
	s := New(tiny, nil, Options{})
	if _, err := s.OutlineNew("x", Config{Rank: 1}); err == nil {
		t.Error("a configuration without targets has an outline")
	}
	for what, damage := range map[string]func(dir string) error{
		"no configuration": func(dir string) error { return os.Remove(filepath.Join(dir, configName)) },
		"no weights":       func(dir string) error { return os.Remove(filepath.Join(dir, weightsName)) },
		"half of a module": func(dir string) error {
			path := filepath.Join(dir, weightsName)
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			copy(text[bytes.Index(text, []byte(suffixA)):], ".lora_C.weight")
			return os.WriteFile(path, text, 0o644)
		},
	} {
		dir := t.TempDir()
		must(t, os.CopyFS(dir, os.DirFS("testdata/golden/adapter")))
		must(t, damage(dir))
		var wrong *AdapterError
		if _, err := s.Outline("x", dir, LoadOptions{}); !errors.As(err, &wrong) {
			t.Errorf("%s: outline: %v", what, err)
		}
		if _, err := Describe(dir, LoadOptions{}); !errors.As(err, &wrong) {
			t.Errorf("%s: describe: %v", what, err)
		}
	}
}
