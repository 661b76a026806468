// Reads YAML documents from standard input and decodes those of the Prometheus operator strictly: a
// field that the operator does not know is an error.
package main

import (
	"bytes"
	"fmt"
	"io"
	"os"

	v1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"sigs.k8s.io/yaml"
)

func run() error {
	input, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	decoded := 0
	for _, document := range bytes.Split(input, []byte("\n---\n")) {
		var object struct {
			Kind string `json:"kind"`
		}
		if err := yaml.Unmarshal(document, &object); err != nil {
			return err
		}
		var into any
		switch object.Kind {
		case "ServiceMonitor":
			into = &v1.ServiceMonitor{}
		case "PrometheusRule":
			into = &v1.PrometheusRule{}
		default:
			continue
		}
		if err := yaml.UnmarshalStrict(document, into); err != nil {
			return fmt.Errorf("%s: %w", object.Kind, err)
		}
		decoded++
	}
	fmt.Println(decoded)
	return nil
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
