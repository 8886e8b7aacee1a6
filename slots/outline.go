package slots

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/trainerrank/engine/forward"
)

// Outline is a slot before it exists: all but its values, found out from headers. A call can be planned on it, and none can run on it.
type Outline struct {
	Info                     // as it will be
	Adapter *forward.Adapter // laid out, without parameters
	Saved   bool             // its folder is one that [Set.Save] wrote
}

// Outline is what [Set.Load] of a folder makes, without its values. It takes no memory of the device, reads no more than headers, and does not mind dropout.
func (s *Set) Outline(name, dir string, o LoadOptions) (*Outline, error) {
	out, err := outlineFolder(name, present(dir), s.modules, o)
	if err != nil {
		return nil, fmt.Errorf("outline checkpoint %s: %w", quote(name), err)
	}
	return out, nil
}

// OutlineNew is what [Set.Create] makes, without its values.
func (s *Set) OutlineNew(name string, c Config) (*Outline, error) {
	if c.BaseModel == "" {
		c.BaseModel = s.base
	}
	err := c.check()
	if err == nil {
		var p *plan
		if p, err = planOf(name, s.modules, nil, &c); err == nil {
			return p.outline(s.modules, nil, true), nil
		}
	}
	return nil, fmt.Errorf("outline checkpoint %s: %w", quote(name), err)
}

// Describe is the outline of the adapter in a folder without the model that it is of: the modules are those that its weights name.
func Describe(dir string, o LoadOptions) (*Outline, error) {
	dir = present(dir)
	modules, err := modulesOf(filepath.Join(dir, weightsName))
	if err == nil {
		var out *Outline
		if out, err = outlineFolder("", dir, modules, o); err == nil {
			return out, nil
		}
	}
	return nil, fmt.Errorf("describe checkpoint: %w", err)
}

func outlineFolder(name, dir string, modules []forward.Module, o LoadOptions) (*Outline, error) {
	f, err := openFolder(dir, modules, false)
	if err != nil {
		return nil, err
	}
	defer f.close()
	f.plan.name, f.plan.adapter.Name = name, name
	return f.plan.outline(modules, f.manifest, !o.Inference), nil
}

// outline is what the plan is of, with the state that a manifest has, if there is one.
func (p *plan) outline(modules []forward.Module, m *manifest, trained bool) *Outline {
	out := &Outline{Adapter: p.adapter, Saved: m != nil}
	out.Info = Info{Name: p.name, Config: *p.summary, Bytes: p.sizes(trained), Trainable: trained}
	for _, l := range p.adapter.LoRA {
		out.Modules = append(out.Modules, modules[l.Module].Path)
	}
	for i := range p.tensors {
		out.Elements += p.tensors[i].elements()
	}
	for _, o := range p.owned {
		out.Elements += elements(o.shape)
		out.Owned = append(out.Owned, o.name)
	}
	slices.Sort(out.Owned)
	if m != nil {
		out.Revision = m.Revision
		if trained {
			out.Adam, out.Steps = m.Adam, m.Steps["adapter"]
		}
	}
	return out
}

// modulesOf are the modules to which the matrices of a file belong. Of one that is not there the module has no elements, which is for [checkNames] to mind.
func modulesOf(path string) ([]forward.Module, error) {
	set, err := openTensors(path)
	if err != nil {
		return nil, err
	}
	defer set.Close()
	var list []forward.Module
	place := map[string]int{}
	for _, name := range set.Names() {
		x, _ := set.Tensor(name)
		if len(x.Shape) != 2 {
			continue
		}
		module, isA := strings.CutSuffix(name, suffixA)
		module, isB := strings.CutSuffix(module, suffixB)
		module, named := strings.CutPrefix(module, prefix)
		if !named || !isA && !isB {
			continue
		}
		i, known := place[module]
		if !known {
			i = len(list)
			place[module], list = i, append(list, forward.Module{Path: module})
		}
		if isA {
			list[i].In = int(x.Shape[1])
		} else {
			list[i].Out = int(x.Shape[0])
		}
	}
	return list, nil
}
