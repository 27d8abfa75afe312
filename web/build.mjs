// Builds every page into the Python package, or with --test runs the unit tests.
//
//   node build.mjs [--out DIR]   DIR/NAME.js, DIR/NAME.css, DIR/LICENSES.txt and DIR/SOURCES.txt
//   node build.mjs --test
//
// A further page is a further entry of PAGES: src/NAME/main.tsx with all that it imports becomes NAME.js and NAME.css.

import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { spawnSync } from "node:child_process";
import { dirname, join, relative, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import esbuild from "esbuild";

const PAGES = ["explorer"];

const here = dirname(fileURLToPath(import.meta.url));
const common = { bundle: true, jsx: "automatic", jsxImportSource: "preact", target: "es2022", logLevel: "warning", absWorkingDir: here };

function filesUnder(folder) {
  return readdirSync(folder, { withFileTypes: true, recursive: true })
    .filter((entry) => entry.isFile())
    .map((entry) => relative(here, join(entry.parentPath, entry.name)).replaceAll("\\", "/"))
    .sort();
}

/** One hash for all that a build depends on, so that a test without Node sees when built files are not of these sources. */
function sourceDigest() {
  const hash = createHash("sha256");
  for (const name of [...filesUnder(join(here, "src")), "build.mjs", "package-lock.json"].sort()) {
    hash.update(`${name}\0`).update(readFileSync(join(here, name))).update("\0");
  }
  return hash.digest("hex");
}

/** The licences of what stands in the bundles. */
function licences(metafile) {
  const found = new Map();
  for (const input of Object.keys(metafile.inputs)) {
    const match = /^(node_modules\/(?:@[^/]+\/)?[^/]+)\//.exec(input);
    if (match) found.set(match[1], JSON.parse(readFileSync(join(here, match[1], "package.json"), "utf8")));
  }
  return [...found].sort(([a], [b]) => (a < b ? -1 : 1)).map(([folder, about]) => {
    const file = readdirSync(join(here, folder)).find((name) => /^licen[cs]e/i.test(name));
    if (!file) throw new Error(`${about.name} has no licence file`);
    return `${about.name} ${about.version} (${about.license})\n\n${readFileSync(join(here, folder, file), "utf8").trim()}\n`;
  });
}

async function build(out) {
  const result = await esbuild.build({
    ...common,
    entryPoints: PAGES.map((page) => ({ in: join(here, `src/${page}/main.tsx`), out: page })),
    outdir: out,
    format: "iife",
    minify: true,
    legalComments: "none",
    charset: "utf8",
    metafile: true,
    define: { "process.env.NODE_ENV": '"production"' },
  });
  const rule = `\n${"-".repeat(80)}\n\n`;
  writeFileSync(join(out, "LICENSES.txt"), ["The built files in this folder contain:\n", ...licences(result.metafile)].join(rule));
  writeFileSync(join(out, "SOURCES.txt"), `${sourceDigest()}\n`);
  for (const [name, { bytes }] of Object.entries(result.metafile.outputs)) console.log(`${name}  ${(bytes / 1000).toFixed(1)} kB`);
}

async function test() {
  const out = join(here, "build/test");
  rmSync(out, { recursive: true, force: true });
  mkdirSync(out, { recursive: true });
  const tests = filesUnder(join(here, "test")).filter((name) => name.endsWith(".test.ts"));
  await esbuild.build({ ...common, entryPoints: tests, outdir: out, format: "esm", platform: "node", outExtension: { ".js": ".mjs" } });
  const built = readdirSync(out).filter((name) => name.endsWith(".mjs")).map((name) => join(out, name));
  process.exit(spawnSync(process.execPath, ["--test", ...built], { stdio: "inherit" }).status ?? 1);
}

const place = process.argv.indexOf("--out");
const out = resolve(here, place > 0 ? process.argv[place + 1] : "../src/gatespace/addons/pages/static");
if (!existsSync(join(here, "node_modules/esbuild"))) throw new Error("run npm ci first");
await (process.argv.includes("--test") ? test() : build(out));
