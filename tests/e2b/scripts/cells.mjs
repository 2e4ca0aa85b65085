// Code cells with the client for JavaScript, in the sandbox that is named.
import { Sandbox } from '@e2b/code-interpreter'

const seen = {}
const sandbox = await Sandbox.connect(process.argv[2])
await sandbox.runCode('n = 1')
seen.remembered = (await sandbox.runCode('n += 1; n')).text
const lines = []
await sandbox.runCode("print('one'); print('two')", { onStdout: (message) => lines.push(message.line) })
seen.printed = lines.join('')
const [table] = (await sandbox.runCode("import pandas as pd; pd.DataFrame({'a': [1, 2]})")).results
seen.table = [table.data, [...table.formats()].includes('html')]
const [figure] = (await sandbox.runCode('import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()')).results
seen.figure = [figure.chart.type, Buffer.from(figure.png, 'base64').subarray(1, 4).toString()]
const { error } = await sandbox.runCode('1 / 0')
seen.error = [error.name, error.value]
seen.interrupted = await sandbox.runCode('while True: pass', { timeoutMs: 500 }).catch((error) => error.name)
seen.kept = (await sandbox.runCode('n', { timeoutMs: 30_000 })).text
const context = (await sandbox.listCodeContexts())[0]
await sandbox.restartCodeContext(context)
seen.restarted = (await sandbox.runCode('n', { context })).error.name
const warned = []
const results = []
const errors = []
const callbacks = {
  onStderr: (message) => warned.push(message.line),
  onResult: (result) => results.push(result),
  onError: (error) => errors.push(error.name),
}
await sandbox.runCode("import sys; print('w', file=sys.stderr); display(1); nothing_there", callbacks)
seen.told = [warned, results.length, errors]
seen.lent = (await sandbox.runCode('echo $COLOR', { language: 'bash', envs: { COLOR: 'red' } })).logs.stdout.join('')
const made = await sandbox.createCodeContext({ language: 'bash', cwd: '/tmp' })
const isThere = async () => (await sandbox.listCodeContexts()).some(({ id }) => id === made.id)
seen.made = [made.language, made.cwd, await isThere()]
await sandbox.removeCodeContext(made)
seen.made.push(await isThere())
const drawn = "plt.boxplot([[85, 90, 78, 92, 88], [95, 89, 76, 91, 84, 87]], labels=['a', 'b'], patch_artist=True)"
const [boxes] = (await sandbox.runCode(`import matplotlib.pyplot as plt; plt.figure(); ${drawn}; plt.show()`)).results
seen.box = [boxes.chart.type, boxes.chart.elements.length]
console.log(JSON.stringify(seen))
